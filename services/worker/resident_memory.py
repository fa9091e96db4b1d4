"""Large memory of this process: allocated in huge pages, made resident as it is, and counted.

Owns the calls and the files of the system for that, and what a load says of its memory before and after. It must
not know what the memory is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

_HUGE_PAGE_BYTES = 2 * 2**20
_SMALL_PAGE_BYTES = 4_096
# Makes pages resident and writable as they are: Linux 5.14, asm-generic/mman-common.h.
_MADV_POPULATE_WRITE = 23
_ROLLUP = Path("/proc/self/smaps_rollup")
_HUGE_PAGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# How far memory in use may differ from what was stated before loading.
TOLERANCE = 0.1


class ResidentMemory:
    """Zeroed memory that belongs to this process alone, in huge pages where the system has them.

    A system gives memory when it is first written. ``populate`` makes it resident at once, so that it no longer
    looks free to others and no step waits for it; contents stay as they are, so steps may use the memory meanwhile.

    Raises:
        OSError, ValueError, OverflowError: when the system has no such memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        # Shared mappings, which are Python's default, are not given huge pages under most systems' settings.
        is_private = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")
        self._map = (
            mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if is_private
            else mmap.mmap(-1, size_bytes)
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # With small pages each block that attention reads costs a walk through the page table.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def populate(self, should_stop: Callable[[], bool] = lambda: False, *, num_parts: int = 1) -> None:
        """Make all of it resident, the beginnings of ``num_parts`` equal parts first.

        Where the system cannot do that without writing, this writes zeros, so nothing else may use the memory then:
        ``can_populate_in_use`` says so.

        Raises:
            OSError: when the system has less memory than it promised.
        """
        if not can_populate_in_use():
            self.bytes[::_SMALL_PAGE_BYTES] = 0
            return
        part_bytes = -(-self.size_bytes // num_parts)
        for offset in range(0, part_bytes, _HUGE_PAGE_BYTES):
            for part in range(num_parts):
                if should_stop():
                    return
                begin = part * part_bytes + offset
                self._populate_range(begin, min(begin + _HUGE_PAGE_BYTES, (part + 1) * part_bytes, self.size_bytes))

    def _populate_range(self, begin: int, end: int) -> None:
        first = begin // _SMALL_PAGE_BYTES * _SMALL_PAGE_BYTES
        if end > first:
            _advise(self.bytes.ctypes.data + first, end - first, _MADV_POPULATE_WRITE)


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """What this process has in memory now."""

    resident_bytes: int
    huge_page_bytes: int | None  # None where the system does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStatement:
    """What a load is going to take, said before it does."""

    before_bytes: int
    weights_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int

    @property
    def expected_bytes(self) -> int:
        """Resident bytes of the process when all is loaded."""
        return self.before_bytes + self.weights_bytes + self.kv_cache_bytes + self.workspace_bytes

    def is_met_by(self, in_use: MemoryInUse) -> bool:
        """Whether what is in use differs by less than a tenth."""
        return abs(in_use.resident_bytes - self.expected_bytes) <= TOLERANCE * self.expected_bytes


def measure_memory_in_use() -> MemoryInUse:
    """Read what this process has in memory."""
    return MemoryInUse(int(psutil.Process().memory_info().rss), huge_page_bytes_of(_ROLLUP))


def huge_page_bytes_of(rollup: Path) -> int | None:
    """Return the anonymous memory in huge pages that a ``smaps_rollup`` counts, or None when it cannot be read."""
    try:
        lines = rollup.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "AnonHugePages":
            return int(value.split()[0]) * 1_024
    return None


def describe_huge_pages(huge_page_bytes: int | None, wanted_bytes: int, setting: Path = _HUGE_PAGE_SETTING) -> str:
    """Say whether ``wanted_bytes`` came in huge pages, and if not, what the system's setting is."""
    if huge_page_bytes is None:
        return "unknown: this system does not say"
    if huge_page_bytes >= (1 - TOLERANCE) * wanted_bytes:
        return "yes"
    try:
        policy = f"{setting} is {setting.read_text().strip()}"
    except OSError:
        policy = "this system has none"
    return f"{'in part' if huge_page_bytes else 'no'}: {policy}"


def give_back_freed_memory() -> None:
    """Return memory that the allocator keeps for later to the system, where the C library can do that."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def can_populate_in_use() -> bool:
    """Whether this system makes memory resident without changing what is in it."""
    if not sys.platform.startswith("linux"):
        return False
    probe = np.frombuffer(mmap.mmap(-1, _SMALL_PAGE_BYTES), dtype=np.uint8)
    try:
        _advise(probe.ctypes.data, _SMALL_PAGE_BYTES, _MADV_POPULATE_WRITE)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True


def _advise(address: int, num_bytes: int, advice: int) -> None:
    # Not mmap's own method: it holds the interpreter's lock while the system finds memory.
    if _c_library().madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
