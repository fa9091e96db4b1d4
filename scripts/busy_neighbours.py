"""Processes that want the cores now and then, as the other tiers do while a model is served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

# As much as an engine, a gateway and a client take of a decode step of some milliseconds; ten nicer, as tiers are.
# It ends by telling how often it slept, and how many seconds later than it wanted it had a core again in all.
_PROGRAM: Final = """
import os, signal, time
os.nice(10)
is_over = []
signal.signal(signal.SIGTERM, lambda *_: is_over.append(True))
print(flush=True)
num_sleeps, late_seconds = 0, 0.0
while not is_over:
    end = time.perf_counter() + 0.0007
    while time.perf_counter() < end:
        pass
    begun = time.perf_counter()
    time.sleep(0.0015)
    late_seconds += time.perf_counter() - begun - 0.0015
    num_sleeps += 1
print(num_sleeps, late_seconds)
"""
_END_SECONDS: Final = 10.0


class Neighbours:
    """Processes that are at work."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def stop(self) -> float:
        """End them; returns for how many seconds one waited for a core each time it woke, in the mean."""
        num_sleeps, late_seconds = 0, 0.0
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            told, _ = process.communicate(timeout=_END_SECONDS)
            num_sleeps += int(told.split()[0])
            late_seconds += float(told.split()[1])
        return late_seconds / num_sleeps


@contextmanager
def busy_neighbours(count: int) -> Iterator[Neighbours]:
    """Run so many of them."""
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for _ in range(count):
            command = [sys.executable, "-c", _PROGRAM]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None, "its output is a pipe"
            process.stdout.readline()
        yield Neighbours(processes)
