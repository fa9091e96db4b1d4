"""What a loaded worker does beside its first steps: make its cache resident, and check the memory it has taken.

Owns the thread for that. It must not know steps or the cache's contents. The first touch of memory can cost seconds
for each GiB, on virtual machines above all; no request has to wait for that.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from libs.obs import get_logger
from services.worker.resident_memory import (
    MemoryStatement,
    can_populate_in_use,
    describe_huge_pages,
    give_back_freed_memory,
    measure_memory_in_use,
)

_LOWEST_PRIORITY = 19

_log = get_logger("settling")


class Settling:
    """The time after a load until the process has the memory that it said it would."""

    def __init__(self, populate: Callable[[Callable[[], bool]], None], statement: MemoryStatement) -> None:
        self._populate = populate
        self._statement = statement
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="settling", daemon=True)
        if can_populate_in_use():
            self._thread.start()
        else:
            self._settle()

    def stop(self) -> None:
        """Leave it at what is done, and return when the thread has ended."""
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Wait until all is done."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        _give_way_to_steps()
        self._settle()

    def _settle(self) -> None:
        try:
            self._populate(self._stopped.is_set)
        except OSError as error:
            _log.error("the KV cache cannot be made resident; steps may find no memory", error=str(error))
        if not self._stopped.is_set():
            give_back_freed_memory()
            report_memory(self._statement)


def report_memory(statement: MemoryStatement) -> None:
    """Log what is in use beside what was expected; a warning when they differ by more than a tenth."""
    in_use = measure_memory_in_use()
    large_bytes = statement.weights_bytes + statement.kv_cache_bytes
    fields = {
        "resident_bytes": in_use.resident_bytes,
        "expected_resident_bytes": statement.expected_bytes,
        "huge_page_bytes": in_use.huge_page_bytes,
        "huge_pages": describe_huge_pages(in_use.huge_page_bytes, large_bytes),
    }
    if statement.is_met_by(in_use):
        _log.info("memory in use", **fields)
    else:
        _log.warning("memory in use differs from what was expected", **fields)


def _give_way_to_steps() -> None:
    # On Linux a priority belongs to a thread, not to the process.
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
