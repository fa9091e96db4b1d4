"""Start a whole ``octavo up`` as a user would, and prove that nothing of it is left at the end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent
OCTAVO_UP = (sys.executable, "-m", "services.cli", "up")
_POLL_SECONDS = 0.05
_TAIL_BYTES = 6_000


class OctavoFailed(AssertionError):
    """``octavo up`` did not do what was waited for; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True)
class RunningOctavo:
    """A running ``octavo up``."""

    process: subprocess.Popen[bytes]
    data_dir: Path
    stdout_path: Path
    stderr_path: Path

    @property
    def base_url(self) -> str:
        """The gateway's URL."""
        return str(self.state()["base_url"])

    def state(self) -> dict[str, Any]:
        """What run.json says now."""
        state: dict[str, Any] = json.loads((self.data_dir / "run.json").read_text())
        return state

    def pid_of(self, name: str) -> int:
        """The process id of a child that runs."""
        pid = self.state()["processes"][name]["pid"]
        assert pid is not None, f"{name} does not run"
        return int(pid)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Kill a child; returns the process id that it had."""
        pid = self.pid_of(name)
        os.kill(pid, number)
        return pid

    def wait_until_healthy(self, name: str, *, after_pid: int | None = None, timeout_seconds: float = 60) -> int:
        """Wait until a child is healthy (as another process than ``after_pid``); returns its process id."""

        def pid() -> int | None:
            child = self.state()["processes"][name]
            return child["pid"] if child["is_healthy"] and child["pid"] != after_pid else None

        return int(self._wait_for(pid, f"{name} is healthy", timeout_seconds))

    def wait_until_ready(self, timeout_seconds: float) -> str:
        """Wait for the ready line; returns it."""

        def line() -> str | None:
            text = self.stdout_path.read_text()
            return text.strip() if text.startswith("octavo ready ") and text.endswith("\n") else None

        return str(self._wait_for(line, "the ready line", timeout_seconds))

    def wait_for_stderr(self, text: str, timeout_seconds: float = 30) -> None:
        """Wait until stderr has ``text``."""
        self._wait_for(lambda: text in self.stderr(), f"{text!r} on stderr", timeout_seconds)

    def wait_for_exit(self, timeout_seconds: float = 60) -> int:
        """Wait for the end; returns the exit code."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise OctavoFailed(f"No end within {timeout_seconds} seconds.\n{self.stderr_tail()}") from error

    def stderr(self) -> str:
        """All of stderr so far."""
        return self.stderr_path.read_text(errors="replace")

    def stderr_tail(self) -> str:
        """The end of stderr."""
        return f"--- stderr of octavo up:\n{self.stderr()[-_TAIL_BYTES:]}"

    def survivors(self) -> list[str]:
        """The processes that still live, by their command lines; without the supervisor itself."""
        mark = f"OCTAVO_SUPERVISOR_PID={self.process.pid}".encode()
        found: list[str] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{folder.name}: {command}")
        return found

    def is_data_dir_free(self) -> bool:
        """Say whether nobody holds the data folder's lock, which every process of this ``octavo up`` inherits."""
        with (self.data_dir / "lock").open("r+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def assert_nothing_left(self, timeout_seconds: float = 15) -> None:
        """Fail when a process is alive ``timeout_seconds`` after the supervisor's end."""
        deadline = time.monotonic() + timeout_seconds
        while self.survivors() or not self.is_data_dir_free():
            if time.monotonic() > deadline:
                survivors = "\n".join(self.survivors())
                raise OctavoFailed(f"Processes were left behind:\n{survivors}\n{self.stderr_tail()}")
            time.sleep(_POLL_SECONDS)

    def _wait_for(self, condition: Any, what: str, timeout_seconds: float) -> Any:
        deadline = time.monotonic() + timeout_seconds
        while True:
            has_ended = self.process.poll() is not None
            with suppress(OSError, ValueError, KeyError):
                if (value := condition()) not in (None, False):
                    return value
            if has_ended:
                raise OctavoFailed(f"octavo up ended with {self.process.returncode}.\n{self.stderr_tail()}")
            if time.monotonic() > deadline:
                raise OctavoFailed(f"No sign of: {what} in {timeout_seconds} seconds.\n{self.stderr_tail()}")
            time.sleep(_POLL_SECONDS)


@contextmanager
def start_octavo(
    data_dir: Path,
    *flags: str,
    command: Sequence[str] = OCTAVO_UP,
    environ: Mapping[str, str] | None = None,
    ready_timeout_seconds: float | None = 180,
    stop_timeout_seconds: float = 90,
) -> Iterator[RunningOctavo]:
    """Run ``octavo up`` on a free port; at the end ask it to stop and prove that no process is left.

    Args:
        data_dir: its data folder; stdout and stderr are kept beside it.
        flags: what follows ``--port 0 --data-dir …``.
        command: what to run; tests of the supervisor run it with fake tiers.
        environ: added to the environment.
        ready_timeout_seconds: how long the ready line may take; None does not wait for it.
        stop_timeout_seconds: how long the drain may take.
    """
    stdout_path, stderr_path = data_dir.with_suffix(".stdout"), data_dir.with_suffix(".stderr")
    with stdout_path.open("wb") as stdout, stderr_path.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--port", "0", "--data-dir", str(data_dir), *flags],
            cwd=REPOSITORY,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    octavo = RunningOctavo(process, data_dir, stdout_path, stderr_path)
    try:
        if ready_timeout_seconds is not None:
            octavo.wait_until_ready(ready_timeout_seconds)
        yield octavo
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        octavo.wait_for_exit(stop_timeout_seconds)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        octavo.assert_nothing_left()
