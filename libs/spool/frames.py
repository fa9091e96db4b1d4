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

_LENGTH: Final = struct.Struct("<I")
_HEADER: Final = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class FrameScan:
    """The whole records at the start of some bytes, and how much after them is not a whole frame."""

    records: tuple[bytes, ...]
    num_whole_bytes: int
    num_torn_bytes: int


def encode_frame(record: bytes) -> bytes:
    """Frame a record."""
    if len(record) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(record)} bytes is over the format's limit of {MAX_RECORD_BYTES}")
    return _HEADER.pack(len(record), _checksum(record)) + record


def scan_frames(data: bytes) -> FrameScan:
    """Read whole frames from the start of `data`, up to its end or the first that is torn.

    Nothing after a torn frame is believed: where it ends is not known.
    """
    records: list[bytes] = []
    offset = 0
    while len(data) - offset >= FRAME_HEADER_BYTES:
        length, checksum = _HEADER.unpack_from(data, offset)
        start = offset + FRAME_HEADER_BYTES
        record = data[start : start + length]
        if len(record) != length or _checksum(record) != checksum:
            break
        records.append(record)
        offset = start + length
    return FrameScan(tuple(records), num_whole_bytes=offset, num_torn_bytes=len(data) - offset)


def _checksum(record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(_LENGTH.pack(len(record))))
