"""Processes that want the cores now and then, as the other tiers do while a model is served."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# As much as an engine, a gateway and a client take of a decode step of some milliseconds; ten nicer, as tiers are.
_PROGRAM = """
import os, time
os.nice(10)
while True:
    end = time.perf_counter() + 0.0007
    while time.perf_counter() < end:
        pass
    time.sleep(0.0015)
"""


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Run so many of them."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _PROGRAM]))
            stack.callback(process.kill)
        yield
