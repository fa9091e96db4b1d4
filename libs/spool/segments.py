"""Segments: the files of a spool. Owns their names, rotation, the bound in bytes and what reaches the disk.

A writer never appends to a file that it did not make: after a crash the old files stay as they are, a torn
tail stays at the end of its file, and new records go to a new one. So a torn frame never has a good one
behind it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NewType, Self

from libs.errors import StoreUnavailable
from libs.spool.frames import FrameScan, encode_frame, scan_frames

SegmentNumber = NewType("SegmentNumber", int)

_SUFFIX: Final = ".spool"
_LOCK_NAME: Final = "writer.lock"


class SpoolWriter:
    """Appends records to the files of one folder, within a bound.

    With `fsync`, a record survives the machine's loss of power once `append` returned; without, it survives
    the death of this process (also by kill -9) but not of the machine. A spool holds at most `max_bytes`,
    counting what earlier writers left; what does not fit is refused, never dropped from the old end.
    """

    def __init__(self, directory: Path, max_bytes: int, segment_bytes: int, fsync: bool) -> None:
        if segment_bytes < 1 or max_bytes < segment_bytes:
            raise ValueError(f"need 1 <= segment_bytes <= max_bytes, not {segment_bytes} and {max_bytes}")
        self._directory = directory
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._active: _ActiveSegment | None = None
        self._is_closed = False
        directory.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock_folder(directory)
        self._last_number = max((segment.number for segment in read_segments(directory)), default=0)
        self._size_bytes = spool_size_bytes(directory)

    def append(self, record: bytes) -> SegmentNumber:
        """Write a record and return the number of the segment that holds it.

        Raises StoreUnavailable when the spool is full or the disk refuses; the record is then not in it.
        """
        if self._is_closed:
            raise StoreUnavailable(f"the spool {self._directory} is closed; open it again to append")
        frame = encode_frame(record)
        self._make_room(len(frame))
        try:
            if self._active is not None and self._active.size_bytes + len(frame) > self._segment_bytes:
                self.seal()
            if self._active is None:
                self._active = self._open_segment()
            self._active.write(frame, self._fsync)
        except OSError as error:
            # What lies in the file is no longer certain: leave it to be read as a torn tail.
            self.seal()
            raise StoreUnavailable(
                f"cannot write to the spool {self._directory}: {error.strerror}; check the disk"
            ) from error
        self._size_bytes += len(frame)
        return self._active.number

    def seal(self) -> None:
        """End the segment being written, if there is one; the next record starts a new one."""
        if self._active is not None:
            self._active.close()
            self._active = None

    def close(self) -> None:
        """Seal and give the folder up to another writer."""
        if self._is_closed:
            return
        self._is_closed = True
        self.seal()
        os.close(self._lock_fd)

    @property
    def active_number(self) -> SegmentNumber | None:
        """The segment being written, which must not be deleted; None when all are sealed."""
        return None if self._active is None else self._active.number

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _make_room(self, num_bytes: int) -> None:
        if self._size_bytes + num_bytes <= self._max_bytes:
            return
        # Readers delete segments without telling the writer, so look before refusing.
        self._size_bytes = spool_size_bytes(self._directory)
        if self._size_bytes + num_bytes > self._max_bytes:
            raise StoreUnavailable(
                f"the spool {self._directory} holds {self._size_bytes} of at most {self._max_bytes} bytes; "
                f"bring back the store that it drains to, or raise the bound"
            )

    def _open_segment(self) -> _ActiveSegment:
        number = SegmentNumber(self._last_number + 1)
        segment = _ActiveSegment(number, _segment_path(self._directory, number))
        self._last_number = number
        if self._fsync:
            _sync_folder(self._directory)
        return segment


@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a spool, as a reader sees it."""

    number: SegmentNumber
    path: Path

    def scan(self) -> FrameScan:
        """Read the whole records and the size of the torn tail; nothing at all if the file is gone."""
        try:
            return scan_frames(self.path.read_bytes())
        except FileNotFoundError:
            return FrameScan((), num_whole_bytes=0, num_damaged_bytes=0, num_torn_bytes=0)

    def records(self) -> list[bytes]:
        """Read the whole records, in the order in which they were appended."""
        return list(self.scan().records)

    def delete(self) -> None:
        """Remove the file; its records are not seen again. Only for a segment that is sealed."""
        self.path.unlink(missing_ok=True)
        # Without this a power cut could bring the file back; its records would be handled twice.
        _sync_folder(self.path.parent)


def read_segments(directory: Path) -> Iterator[Segment]:
    """List the segments of a folder, oldest first, also the one that a writer is at work on."""
    numbers = (_segment_number(path) for path in directory.glob(f"*{_SUFFIX}"))
    for number in sorted(number for number in numbers if number is not None):
        yield Segment(number, _segment_path(directory, number))


def spool_size_bytes(directory: Path) -> int:
    """Add up the sizes of the segments of a folder."""
    size_bytes = 0
    for segment in read_segments(directory):
        try:
            size_bytes += segment.path.stat().st_size
        except FileNotFoundError:
            continue  # Deleted by a reader between the listing and now.
    return size_bytes


class _ActiveSegment:
    """The file being written."""

    def __init__(self, number: SegmentNumber, path: Path) -> None:
        self.number = number
        self.size_bytes = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, frame: bytes, fsync: bool) -> None:
        try:
            remaining = memoryview(frame)
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
            if fsync:
                os.fdatasync(self._fd)
        except OSError:
            # The caller is told that the record is not in the spool, so it must not be read from it later.
            os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += len(frame)

    def close(self) -> None:
        os.close(self._fd)


def _segment_path(directory: Path, number: SegmentNumber) -> Path:
    return directory / f"{number:020d}{_SUFFIX}"


def _segment_number(path: Path) -> SegmentNumber | None:
    return SegmentNumber(int(path.stem)) if path.stem.isascii() and path.stem.isdigit() else None


def _lock_folder(directory: Path) -> int:
    fd = os.open(directory / _LOCK_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StoreUnavailable(
            f"another process writes to the spool {directory}; give each process a folder of its own"
        ) from error
    return fd


def _sync_folder(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
