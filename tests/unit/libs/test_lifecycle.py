"""A process under signals, and without its parent: each in a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

_REPOSITORY = str(Path(__file__).parents[3])

_PROGRAM = """
import asyncio, sys
from libs.errors import ModelLoadFailed
from libs.lifecycle import run
from libs.obs import configure_logging

async def fail():
    raise ModelLoadFailed("No weights there.")

async def main(lifecycle):
    if "fail" in sys.argv:
        raise ModelLoadFailed("No weights there.")
    if "fault" in sys.argv:
        raise RuntimeError("unforeseen")
    if "fail-in-task" in sys.argv:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
    if "fault-in-task" in sys.argv:
        raise ExceptionGroup("both", [ModelLoadFailed("No weights there."), RuntimeError("unforeseen")])
    print("running", type(asyncio.get_running_loop()).__module__, flush=True)
    if "return" in sys.argv:
        return
    await lifecycle.wait_for_shutdown()
    print("draining", flush=True)
    if "hang" in sys.argv:
        await asyncio.Event().wait()
    print("drained", flush=True)

configure_logging("worker", "worker-0")
run(main, tier="worker")
"""


@contextmanager
def _program(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        cwd=_REPOSITORY,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_drains(number: signal.Signals) -> None:
    with _program() as process:
        assert _line(process) == "running uvloop"
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)

    assert out == "draining\ndrained\n"
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_drain_that_hangs(number: signal.Signals) -> None:
    with _program("hang") as process:
        _line(process)
        process.send_signal(signal.SIGTERM)
        assert _line(process) == "draining"
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode == 130


def test_a_main_that_returns_ends_the_process_well() -> None:
    with _program("return") as process:
        process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode == 0


@pytest.mark.parametrize("where", ["fail", "fail-in-task"])
def test_an_error_of_ours_is_one_line_and_a_failure(where: str) -> None:
    with _program(where) as process:
        _, err = process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode == 1
    assert err.count("\n") == 1
    assert '"error": "No weights there."' in err
    assert '"error_class": "ModelLoadFailed"' in err


@pytest.mark.parametrize("where", ["fault", "fault-in-task"])
def test_a_fault_shows_where_it_happened(where: str) -> None:
    with _program(where) as process:
        _, err = process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode == 1
    assert "RuntimeError: unforeseen" in err


_SUPERVISOR = f"""
import os, subprocess, sys
environ = {{**os.environ, "OCTAVO_SUPERVISOR_PID": str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {_PROGRAM!r}], env=environ, stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG of Linux")
def test_a_supervised_process_ends_when_its_supervisor_is_killed() -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR],
        cwd=_REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with supervisor:
        pid, _, state = _line(supervisor).partition(" ")
        assert state == "running uvloop"

        supervisor.kill()

        _wait_until_gone(int(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG of Linux")
def test_a_process_whose_supervisor_is_gone_already_does_not_begin() -> None:
    # The id of a process that is not the parent stands for a supervisor that died before.
    with _program(OCTAVO_SUPERVISOR_PID=str(os.getpid() + 1)) as process:
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)

    assert (process.returncode, out) == (1, "")


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    # A zombie has ended; whoever adopts it may take its time.
    return status.rpartition(")")[2].split()[0] != "Z"
