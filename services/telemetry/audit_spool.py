"""The audit's spool: batches that were taken and are not yet in the store, on disk.

Owns what telemetry must not lose: a batch is on the disk (fsync) when `append` returns, survives kill -9 and
a loss of power, and leaves when the store has confirmed it. Owns also which batch ids were taken lately, so
that a batch sent again is not taken again, also after a restart. It must not know the store.

All calls must come from one thread at a time; they wait for the disk.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from libs.errors import StoreUnavailable
from libs.obs import get_logger
from libs.spool import Segment, SegmentNumber, SpoolWriter, read_segments, spool_size_bytes
from services.telemetry.audit_record import AuditBatch, AuditRecord, BatchId, decode_records, encode_records

_log = get_logger("audit_spool")

NUM_RECENT_BATCHES: Final = 10_000

_SEGMENT_BYTES: Final = 1 << 20
_ID_BYTES: Final = 16
_RECENT_SEGMENT_BYTES: Final = 1 << 18
# Enough files of ids that the newest full one holds more than NUM_RECENT_BATCHES.
_RECENT_MAX_BYTES: Final = 8 * _RECENT_SEGMENT_BYTES
# A batch in the spool: format, batch id, when it was taken (Unix seconds); then the records.
_HEADER: Final = struct.Struct("<B16sd")
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class SpooledBatch:
    """A batch as it lies in the spool; its records are not decoded yet."""

    batch_id: BatchId
    taken_time: float
    payload: bytes


@dataclass(frozen=True, slots=True)
class SealedBatches:
    """A piece of the spool that can go to the store. What cannot be decoded is given as it lies there."""

    segment: Segment
    batch_ids: tuple[BatchId, ...]
    records: tuple[AuditRecord, ...]
    undecodable: tuple[bytes, ...]
    # Of batches that were taken and that the disk does not give back as they were.
    num_lost_bytes: int = 0


class AuditSpool:
    """A durable queue of batches in one folder, bounded in bytes; the oldest leaves first."""

    def __init__(self, directory: Path, max_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._batches_dir = directory / "batches"
        self._writer = SpoolWriter(
            self._batches_dir, max_bytes=max_bytes, segment_bytes=min(_SEGMENT_BYTES, max_bytes), fsync=True
        )
        self._recent = _RecentBatches(directory / "taken")
        # What a crash has torn off the end of each file; it was never acknowledged.
        self._torn_bytes: dict[SegmentNumber, int] = {}
        # When the first batch of each file was taken.
        self._taken_times: dict[SegmentNumber, float] = {}
        for segment in read_segments(self._batches_dir):
            self._recover(segment)

    def append(self, batch: AuditBatch) -> bool:
        """Take a batch; return False if it was taken before. On disk when this returns.

        Raises StoreUnavailable when the spool is full; the batch may then be sent again later.
        """
        if batch.batch_id in self._recent:
            return False
        now = self._clock()
        header = _HEADER.pack(_FORMAT, batch.batch_id.bytes, now)
        number = self._writer.append(header + encode_records(batch.records))
        self._taken_times.setdefault(number, now)
        self._recent.remember((batch.batch_id,))
        return True

    def seal(self) -> list[Segment]:
        """End the file being written and list all that can go to the store, oldest first."""
        self._writer.seal()
        return list(read_segments(self._batches_dir))

    def read(self, segment: Segment) -> SealedBatches:
        """Decode a sealed file."""
        batch_ids: list[BatchId] = []
        records: list[AuditRecord] = []
        undecodable: list[bytes] = []
        scan = segment.scan()
        for data in scan.records:
            try:
                batch = _split(data)
                records.extend(decode_records(batch.payload))
                batch_ids.append(batch.batch_id)
            except ValueError:
                undecodable.append(data)
        num_lost_bytes = scan.num_damaged_bytes + scan.num_torn_bytes - self._torn_bytes.get(segment.number, 0)
        return SealedBatches(segment, tuple(batch_ids), tuple(records), tuple(undecodable), max(0, num_lost_bytes))

    def confirm(self, batches: SealedBatches) -> None:
        """Forget what the store has; only the ids stay, in case a batch is sent again."""
        # Ids first: between the two steps a crash may leave both, never none.
        try:
            self._recent.keep(batches.batch_ids)
        except StoreUnavailable as error:
            # On a full disk only what is deleted makes room. At worst a batch is sent again after a restart, and
            # its rows come again under keys that the store has.
            _log.warning("ids of batches are not kept", error=error.message)
        batches.segment.delete()
        self._taken_times.pop(batches.segment.number, None)
        self._torn_bytes.pop(batches.segment.number, None)

    @property
    def num_torn_bytes(self) -> int:
        """Bytes that crashes have torn off files which still wait for the store."""
        return sum(self._torn_bytes.values())

    @property
    def size_bytes(self) -> int:
        """Bytes that wait for the store."""
        return spool_size_bytes(self._batches_dir)

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest batch that waits for the store; 0 when none does."""
        now = self._clock()
        return max(0.0, now - min(self._taken_times.values(), default=now))

    def close(self) -> None:
        """Give the folder up; what it holds stays for the next process."""
        self._writer.close()
        self._recent.close()

    def _recover(self, segment: Segment) -> None:
        scan = segment.scan()
        self._torn_bytes[segment.number] = scan.num_torn_bytes
        for data in scan.records:
            try:
                batch = _split(data)
            except ValueError:
                continue  # Reported when it is read to be sent.
            self._recent.remember((batch.batch_id,))
            self._taken_times.setdefault(segment.number, batch.taken_time)


class DeadLetters:
    """Records that the store refuses by themselves, kept on disk in the form of the spool, bounded in bytes."""

    def __init__(self, directory: Path, max_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._writer = SpoolWriter(
            directory, max_bytes=max_bytes, segment_bytes=min(_SEGMENT_BYTES, max_bytes), fsync=True
        )

    def add(self, record: AuditRecord) -> None:
        """Keep a record; raises StoreUnavailable when there is no room."""
        header = _HEADER.pack(_FORMAT, record.request_id.bytes, self._clock())
        self.add_raw(header + encode_records((record,)))

    def add_raw(self, data: bytes) -> None:
        """Keep what could not be decoded, as it is."""
        try:
            self._writer.append(data)
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"no room to set aside a record that the store refuses; look into it and empty the folder: {error}"
            ) from error

    def close(self) -> None:
        """Give the folder up; what it holds stays."""
        self._writer.close()


class _RecentBatches:
    """The last `NUM_RECENT_BATCHES` batch ids. In memory at once, on disk when their batch leaves the spool.

    Until then the batch itself, in the spool, remembers its id over a restart.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ids: OrderedDict[BatchId, None] = OrderedDict()
        self._writer = SpoolWriter(
            directory, max_bytes=_RECENT_MAX_BYTES, segment_bytes=_RECENT_SEGMENT_BYTES, fsync=True
        )
        for segment in read_segments(directory):
            for data in segment.records():
                self.remember(BatchId(UUID(bytes=data[i : i + _ID_BYTES])) for i in range(0, len(data), _ID_BYTES))

    def __contains__(self, batch_id: BatchId) -> bool:
        return batch_id in self._ids

    def remember(self, batch_ids: Iterable[BatchId]) -> None:
        for batch_id in batch_ids:
            self._ids[batch_id] = None
            self._ids.move_to_end(batch_id)
        while len(self._ids) > NUM_RECENT_BATCHES:
            self._ids.popitem(last=False)

    def keep(self, batch_ids: Sequence[BatchId]) -> None:
        """Write ids to the disk and drop the files of ids that are too old to matter."""
        if not batch_ids:
            return
        self._writer.append(b"".join(batch_id.bytes for batch_id in batch_ids))
        segments = list(read_segments(self._directory))
        sizes = [segment.path.stat().st_size for segment in segments]
        for index, segment in enumerate(segments[:-1]):
            if sum(sizes[index + 1 :]) < _RECENT_SEGMENT_BYTES:
                break
            segment.delete()

    def close(self) -> None:
        self._writer.close()


def _split(data: bytes) -> SpooledBatch:
    """Read a batch's header; raises ValueError if this is not a batch in a format known here."""
    if len(data) < _HEADER.size:
        raise ValueError(f"{len(data)} bytes are too few for a batch")
    version, batch_id, taken_time = _HEADER.unpack_from(data)
    if version != _FORMAT:
        raise ValueError(f"a batch in format {version}; this version reads format {_FORMAT}")
    return SpooledBatch(BatchId(UUID(bytes=batch_id)), taken_time, data[_HEADER.size :])
