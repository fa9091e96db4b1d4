"""A fresh ``octavo up`` for a benchmark, and what its processes cost."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
_READY_TIMEOUT_SECONDS = 300.0
_STOP_TIMEOUT_SECONDS = 120.0
_CLOCK_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@contextmanager
def running_octavo(flags: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run ``octavo up`` with flags; gives what its run.json says once it is ready."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        data_dir = Path(folder) / "data"
        command = [sys.executable, "-m", "services.cli", "up", "--port", "0", "--data-dir", str(data_dir)]
        command += [*flags, "--set", "gateway.log_level=warning", "--set", "engine.log_level=warning"]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as process:
            try:
                yield _wait_until_ready(process, data_dir / "run.json")
            finally:
                # When it is killed its processes end with it.
                stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it when it takes too long."""
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], run_file: Path) -> dict[str, Any]:
    deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if run_file.exists():
            state: dict[str, Any] = json.loads(run_file.read_text())
            # The audit store is started last, and nothing waits for it.
            if state["is_ready"] and all(child["pid"] for child in state["processes"].values()):
                return state
        time.sleep(0.1)
    sys.exit("octavo up did not become ready.")


def cpu_seconds_by_process(state: dict[str, Any]) -> dict[str, float]:
    """Return the processor time that each process has used so far."""
    seconds: dict[str, float] = {}
    for name, child in state["processes"].items():
        # Fields 14 and 15 are utime and stime; the name before them may have spaces.
        fields = Path(f"/proc/{child['pid']}/stat").read_text().rpartition(")")[2].split()
        seconds[name] = (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_SECOND
    return seconds


def cpu_model() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
