"""Memory for a long body: a gateway has it before one comes, lends it, and takes it back afterwards.

Owns what Python's allocator and the C library's are told for that. It must not know what bodies mean.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any, Final

# Of the C library's memory, in bodies of the largest size: bytes, which are moved as they grow, and what they hold.
_BODIES_OF_BYTES: Final = 4
# Of Python's own memory for small objects: half a million token ids of 3 MB are objects of 16 MB.
_BODIES_OF_OBJECTS: Final = 4
# Where an operator takes larger bodies than this, what they need beyond it is had when they come.
_MAX_BODY_BYTES: Final = 4 * 2**20
# The most that glibc can be told; larger pieces come and go as before.
_MMAP_THRESHOLD_BYTES: Final = 32 * 2**20
# The memory is taken back when no long body has come for so long.
_QUIET_SECONDS: Final = 1.0

# Parameters of glibc's mallopt (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# An object that Python's own allocator makes (up to 512 bytes) and its header.
_OBJECT_BYTES, _HEADER_BYTES = 400, 33
# That allocator gives memory back in arenas of 1 MiB in which nothing is left (CPython's Objects/obmalloc.c).
_BYTES_FOR_EACH_PIN: Final = 512 * 1024


class BodyMemory:
    """The memory for one body of the largest size.

    A system gives memory page by page, when a page is first written. In a virtual machine whose host must find the
    page, that took 24 µs: 70 ms for a body of 4 MB, and no stream got a token meanwhile.

    Memory that were only free would not stay: protobuf calls ``malloc_trim`` for every 10,000th message, which
    gives all free pages back. So it is a piece of its own, which is free only while long bodies are there.
    """

    def __init__(self, max_body_bytes: int) -> None:
        """Begin; to be called before there are threads, since each may get a heap of its own."""
        body_bytes = min(max_body_bytes, _MAX_BODY_BYTES)
        self._num_objects = _BODIES_OF_OBJECTS * body_bytes // (_OBJECT_BYTES + _HEADER_BYTES)
        self._pins: list[bytes] = []
        self._piece = _Piece(_BODIES_OF_BYTES * body_bytes)
        self._is_lent = asyncio.Event()
        self._num_lent = 0

    def take(self) -> None:
        """Have all of it from the system, at the start."""
        self._piece.take()
        small = [bytes(_OBJECT_BYTES) for _ in range(self._num_objects)]
        # A few objects keep the arenas of all.
        self._pins = small[:: _BYTES_FOR_EACH_PIN // (_OBJECT_BYTES + _HEADER_BYTES)]

    def lend(self) -> None:
        """Let a long body that comes now have it."""
        self._piece.give()
        self._num_lent += 1
        self._is_lent.set()

    async def run(self) -> None:
        """Take it back after the last long body, again and again, until cancelled."""
        while True:
            await self._is_lent.wait()
            num_lent = self._num_lent
            await asyncio.sleep(_QUIET_SECONDS)
            if self._num_lent == num_lent:
                self._is_lent.clear()
                # To write to all of it takes milliseconds, but not the interpreter.
                await asyncio.to_thread(self._piece.take)


class _Piece:
    """One piece of the C library's memory; none where that is not glibc, which alone can be told where it lies."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._address: int | None = None
        libc: Any = ctypes.CDLL(None)  # Any: functions by name.
        self._libc = libc if hasattr(libc, "gnu_get_libc_version") else None
        if self._libc is None:
            return
        libc.malloc.restype = ctypes.c_void_p
        libc.malloc.argtypes = [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.mallopt(_ARENA_MAX, 1)
        # Unasked glibc maps large pieces from the system and gives them back, until it has learned better.
        libc.mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, 4 * num_bytes)

    def take(self) -> None:
        """Have it, and all its pages."""
        if self._libc is None or self._address is not None:
            return
        address = self._libc.malloc(self._num_bytes)
        if address is not None:
            ctypes.memset(address, 1, self._num_bytes)
        self._address = address

    def give(self) -> None:
        """Let others have it."""
        if self._libc is not None and self._address is not None:
            address, self._address = self._address, None
            self._libc.free(address)
