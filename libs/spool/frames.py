"""Frames: how a record lies in a spool file. Pure functions over bytes; no files here.

A frame is the record's length and a checksum, four little-endian bytes each, then the record. The checksum
covers the length too, so that a tail of zeros (what some file systems leave after a power cut) is no frame.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

FRAME_HEADER_BYTES: Final = 8
MAX_RECORD_BYTES: Final = 2**32 - 1
# A search through so many bytes takes a second at worst.
MAX_DAMAGE_BYTES: Final = 2**20

_LENGTH: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class FrameScan:
    """The whole records in some bytes, how many bytes between them are damaged, and how many follow the last."""

    records: tuple[bytes, ...]
    num_whole_bytes: int
    num_damaged_bytes: int
    num_torn_bytes: int


def encode_frame(record: bytes) -> bytes:
    """Frame a record."""
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(record)} bytes is over the format's limit of {MAX_RECORD_BYTES}")
    return _HEADER.pack(len(record), _checksum(record)) + record


def scan_frames(data: bytes) -> FrameScan:
    """Read the whole frames in `data`.

    What is no frame is passed over up to the next one, for at most `MAX_DAMAGE_BYTES`: one bit that a disk turns
    must not cost what lies behind it. After the last frame it is taken for torn.
    """
    records: list[bytes] = []
    num_damaged_bytes, end = 0, 0
    start: int | None = 0
    while start is not None:
        record = _record_at(data, start)
        if record is not None:
            records.append(record)
            num_damaged_bytes += start - end
            start = end = start + FRAME_HEADER_BYTES + len(record)
        else:
            start = _next_candidate(data, start + 1, last=end + MAX_DAMAGE_BYTES)
    return FrameScan(
        tuple(records),
        num_whole_bytes=end - num_damaged_bytes,
        num_damaged_bytes=num_damaged_bytes,
        num_torn_bytes=len(data) - end,
    )


def _record_at(data: bytes, start: int) -> bytes | None:
    if len(data) - start < FRAME_HEADER_BYTES:
        return None
    length, checksum = _HEADER.unpack_from(data, start)
    first = start + FRAME_HEADER_BYTES
    if length > len(data) - first:
        return None
    record = data[first : first + length]
    return record if _checksum(record) == checksum else None


def _next_candidate(data: bytes, start: int, *, last: int) -> int | None:
    """Return where a frame may begin next: the fourth byte of its length is 0 unless the record has 16 MiB."""
    found = data.find(0, start + 3, last + 4)
    return None if found < 0 else found - 3


def _checksum(record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(_LENGTH.pack(len(record))))
