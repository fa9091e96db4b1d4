"""The gateway's journal on disk: which requests were accepted, how they ended, and what telemetry has taken.

Owns the entries, what a restart makes of them, and when a segment may go. Entries reach the kernel with each call
and are not forced to the disk: they survive the death of the process, also by kill -9, but not of the machine.
It must not know gRPC.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from libs.obs import get_logger
from libs.spool import Segment, SegmentNumber, SpoolWriter, read_segments
from services.gateway.audit_record import AcceptedRequest, AuditRecord

log = get_logger("accepted_spool")

_SEGMENT_BYTES: Final = 1024 * 1024


class _Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    request: AcceptedRequest


class _Ended(msgspec.Struct, frozen=True, tag="ended"):
    record: AuditRecord


class _Batched(msgspec.Struct, frozen=True, tag="batched"):
    batch_id: str
    request_ids: tuple[str, ...]


class _Acknowledged(msgspec.Struct, frozen=True, tag="acknowledged"):
    batch_id: str


_Entry: TypeAlias = _Accepted | _Ended | _Batched | _Acknowledged

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Entry)


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Records that are sent together; the id is the same for each attempt, also after a restart."""

    batch_id: str
    records: tuple[AuditRecord, ...]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What an earlier process of this gateway left open."""

    # Accepted and never ended: that process died.
    orphans: tuple[AcceptedRequest, ...] = ()
    # Ended and not yet sent.
    records: tuple[AuditRecord, ...] = ()
    # Sent perhaps, and not acknowledged.
    batches: tuple[RecordBatch, ...] = ()


class AcceptedSpool:
    """The journal of one gateway; one process at a time.

    A segment may go when it is the oldest and every request in it was acknowledged, so that no entry outlives
    the acknowledgement of its request.
    """

    def __init__(self, directory: Path, *, max_bytes: int) -> None:
        self._directory = directory
        self._writer = SpoolWriter(
            directory, max_bytes=max_bytes, segment_bytes=min(_SEGMENT_BYTES, max_bytes), fsync=False
        )
        self._segments: deque[Segment] = deque()
        self._needs = _SegmentNeeds()
        self.leftovers = self._replay()

    def accept(self, request: AcceptedRequest) -> None:
        """Note that a request was accepted; raises StoreUnavailable when the spool is full."""
        self._needs.add(request.request_id, self._append(_Accepted(request)))

    def end(self, record: AuditRecord) -> None:
        """Note how a request ended; raises StoreUnavailable when the spool is full."""
        self._needs.add(record.request_id, self._append(_Ended(record)))

    def batch(self, batch: RecordBatch) -> None:
        """Note which records go out under which id; raises StoreUnavailable when the spool is full."""
        self._append(_Batched(batch.batch_id, tuple(record.request_id for record in batch.records)))

    def acknowledge(self, batch: RecordBatch) -> None:
        """Note that a batch is durable elsewhere; raises StoreUnavailable when the spool is full."""
        self._append(_Acknowledged(batch.batch_id))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Stop keeping requests: their records are elsewhere or given up."""
        for request_id in request_ids:
            self._needs.remove(request_id)

    def take_finished(self) -> list[Segment]:
        """Return segments that nobody needs any more, oldest first; the caller deletes them in this order."""
        finished: list[Segment] = []
        while self._segments and not self._is_needed(self._segments[0]):
            finished.append(self._segments.popleft())
        return finished

    def close(self) -> None:
        """Give the folder up; nothing is left in it when all was acknowledged."""
        self._writer.seal()
        for segment in self.take_finished():
            segment.delete()
        self._writer.close()

    def _append(self, entry: _Entry) -> SegmentNumber:
        number = self._writer.append(_encoder.encode(entry))
        if not self._segments or self._segments[-1].number != number:
            self._segments.extend(segment for segment in read_segments(self._directory) if segment.number == number)
        return number

    def _is_needed(self, segment: Segment) -> bool:
        return segment.number == self._writer.active_number or self._needs.has(segment.number)

    def _replay(self) -> Leftovers:
        replay = _Replay()
        for segment in read_segments(self._directory):
            self._segments.append(segment)
            scan = segment.scan()
            if scan.num_damaged_bytes:
                log.error(
                    "the disk has damaged the spool", file=str(segment.path), num_bytes=scan.num_damaged_bytes
                )
            for raw in scan.records:
                try:
                    entry = _decoder.decode(raw)
                except msgspec.DecodeError as error:
                    log.warning("entry of the spool left out", segment=segment.number, error=str(error))
                    continue
                request_id = replay.take(entry)
                if request_id is not None:
                    self._needs.add(request_id, segment.number)
        self.forget(replay.acknowledged_ids)
        return replay.leftovers()


class _Replay:
    """What the entries of an earlier process add up to."""

    def __init__(self) -> None:
        self._accepted: dict[str, AcceptedRequest] = {}
        self._ended: dict[str, AuditRecord] = {}
        self._batches: dict[str, tuple[str, ...]] = {}
        self.acknowledged_ids: set[str] = set()

    def take(self, entry: _Entry) -> str | None:
        """Take the next entry and return the request that needs it to be kept."""
        match entry:
            case _Accepted(request):
                self._accepted[request.request_id] = request
                return request.request_id
            case _Ended(record):
                self._ended[record.request_id] = record
                return record.request_id
            case _Batched(batch_id, request_ids):
                self._batches[batch_id] = request_ids
            case _Acknowledged(batch_id):
                self.acknowledged_ids.update(self._batches.pop(batch_id, ()))
        return None

    def leftovers(self) -> Leftovers:
        """Return what is open at the end."""
        is_open = {key: record for key, record in self._ended.items() if key not in self.acknowledged_ids}
        batches = tuple(
            RecordBatch(batch_id, tuple(is_open.pop(key) for key in request_ids if key in is_open))
            for batch_id, request_ids in self._batches.items()
        )
        known = self._ended.keys() | self.acknowledged_ids
        return Leftovers(
            orphans=tuple(request for key, request in self._accepted.items() if key not in known),
            records=tuple(is_open.values()),
            batches=tuple(batch for batch in batches if batch.records),
        )


class _SegmentNeeds:
    """Which segments hold entries of requests that are not acknowledged yet."""

    def __init__(self) -> None:
        self._segments_of: dict[str, list[SegmentNumber]] = {}
        self._num_requests: Counter[SegmentNumber] = Counter()

    def add(self, request_id: str, number: SegmentNumber) -> None:
        numbers = self._segments_of.setdefault(request_id, [])
        if number not in numbers:
            numbers.append(number)
            self._num_requests[number] += 1

    def remove(self, request_id: str) -> None:
        for number in self._segments_of.pop(request_id, ()):
            self._num_requests[number] -= 1
            if not self._num_requests[number]:
                del self._num_requests[number]

    def has(self, number: SegmentNumber) -> bool:
        return number in self._num_requests
