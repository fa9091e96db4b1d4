"""The way of audit records to telemetry: exactly one for each request, whatever its end and whatever dies.

Owns the batches, their retries, and what happens when the spool is full. It must not know how a request is
served. Two implementations: one with a journal and a client, and one for a gateway that has no telemetry.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from libs.errors import ClientError, OctavoError, StoreUnavailable
from libs.obs import get_logger
from libs.obs.metrics import GatewayMetrics
from services.gateway.accepted_spool import AcceptedSpool, RecordBatch
from services.gateway.audit_record import AcceptedRequest, AuditRecord
from services.gateway.clients import TelemetryClient

log = get_logger("audit")

_MAX_BATCH_RECORDS: Final = 500
_SEND_TIMEOUT_SECONDS: Final = 10.0
_MIN_BACKOFF_SECONDS: Final = 0.1
_MAX_BACKOFF_SECONDS: Final = 2.0
# A record takes about half a kilobyte of the spool, and the spool is bounded; this bounds what the spool refused.
_MAX_UNSPOOLED_RECORDS: Final = 1000


class Audit(Protocol):
    """Where the gateway reports requests."""

    def accepted(self, request: AcceptedRequest) -> None:
        """Report a request before it is placed."""

    def ended(self, record: AuditRecord) -> None:
        """Report the end of a request; once for each."""

    async def run(self) -> None:
        """Work until cancelled."""

    async def flush(self, timeout_seconds: float) -> None:
        """Hand over what can be handed over in time; what is left stays for the next start."""


class NoAudit:
    """For a gateway without telemetry: keeps nothing."""

    def accepted(self, request: AcceptedRequest) -> None:
        """Do nothing."""

    def ended(self, record: AuditRecord) -> None:
        """Do nothing."""

    async def run(self) -> None:
        """Return at once."""

    async def flush(self, timeout_seconds: float) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """How records are batched."""

    gateway_id: str
    flush_seconds: float


class AuditTrail:
    """Sends records to telemetry in batches, from a journal on disk."""

    def __init__(
        self, spool: AcceptedSpool, client: TelemetryClient, settings: AuditSettings, metrics: GatewayMetrics
    ) -> None:
        self._spool = spool
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._pending: deque[AuditRecord] = deque()
        self._unsent_batches: deque[RecordBatch] = deque()
        self._unspooled_ids: set[str] = set()
        self._news = asyncio.Event()
        self._is_closing = asyncio.Event()
        self._idle = asyncio.Event()
        self._is_telemetry_silent = False
        self._is_spool_full = False
        self._take_leftovers()

    def accepted(self, request: AcceptedRequest) -> None:
        """Spool the request; when the spool is full it is served all the same."""
        try:
            self._spool.accept(request)
        except StoreUnavailable as error:
            # Once: who writes a line for each request on a disk that is full makes it no better.
            if not self._is_spool_full:
                log.warning("accepted requests are not spooled", request_id=request.request_id, error=error.message)
            self._is_spool_full = True
        else:
            self._is_spool_full = False

    def ended(self, record: AuditRecord) -> None:
        """Spool the record and queue it for its batch."""
        try:
            self._spool.end(record)
        except StoreUnavailable as error:
            if len(self._unspooled_ids) >= _MAX_UNSPOOLED_RECORDS:
                self._metrics.audit_records_dropped.inc()
                self._spool.forget([record.request_id])
                log.error("audit record dropped", request_id=record.request_id, error=error.message)
                return
            # It may still leave from memory.
            self._unspooled_ids.add(record.request_id)
        self._queue(record)

    async def run(self) -> None:
        """Send batches, one after the other and oldest first, until cancelled."""
        while True:
            await self._delete_finished()
            if not self._unsent_batches:
                await self._next_batch()
            await self._deliver(self._unsent_batches[0])
            self._unsent_batches.popleft()

    async def flush(self, timeout_seconds: float) -> None:
        """Wait until ``run`` has handed all over, but not for long; batches are not filled up any more."""
        self._is_closing.set()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            num_records = len(self._pending) + sum(len(batch.records) for batch in self._unsent_batches)
            log.warning("audit records stay in the spool", num_records=num_records)

    def _take_leftovers(self) -> None:
        leftovers = self._spool.leftovers
        self._unsent_batches.extend(leftovers.batches)
        for record in leftovers.records:
            self._queue(record)
        now = time.time()
        for orphan in leftovers.orphans:
            self.ended(AuditRecord.gateway_lost(orphan, gateway_id=self._settings.gateway_id, now=now))
            self._metrics.orphans_closed.inc()
        if leftovers.orphans:
            log.warning("requests of a gateway that died were closed", num_requests=len(leftovers.orphans))

    def _queue(self, record: AuditRecord) -> None:
        self._pending.append(record)
        self._idle.clear()
        self._news.set()

    async def _next_batch(self) -> None:
        """Wait for records, then a moment for more, and make a batch of them."""
        if not self._pending:
            self._idle.set()
            self._news.clear()
            await self._news.wait()
        if len(self._pending) < _MAX_BATCH_RECORDS:
            try:
                async with asyncio.timeout(self._settings.flush_seconds):
                    await self._is_closing.wait()
            except TimeoutError:
                pass
        records = [self._pending.popleft() for _ in range(min(len(self._pending), _MAX_BATCH_RECORDS))]
        self._unsent_batches.append(self._journaled(records))

    def _journaled(self, records: list[AuditRecord]) -> RecordBatch:
        batch = RecordBatch(str(uuid.uuid4()), tuple(records))
        try:
            self._spool.batch(batch)
        except StoreUnavailable as error:
            # After a restart these records would go out under another id; telemetry knows them by their own.
            log.warning("batch not spooled", batch_id=batch.batch_id, error=error.message)
        return batch

    async def _deliver(self, batch: RecordBatch) -> None:
        """Send a batch until telemetry has taken it; one that it refuses as wrong is taken apart."""
        backoff_seconds = _MIN_BACKOFF_SECONDS
        while True:
            try:
                await self._client.ingest(batch.batch_id, batch.records, _SEND_TIMEOUT_SECONDS)
            except ClientError as error:
                await self._take_apart(batch, error)
                return
            except OctavoError as error:
                self._note_silence(error)
                await asyncio.sleep(backoff_seconds)
                backoff_seconds = min(2 * backoff_seconds, _MAX_BACKOFF_SECONDS)
            else:
                self._is_telemetry_silent = False
                self._settle(batch)
                return

    async def _take_apart(self, batch: RecordBatch, error: ClientError) -> None:
        if len(batch.records) == 1:
            self._metrics.audit_records_dropped.inc()
            request_id = batch.records[0].request_id
            log.error("audit record refused", request_id=request_id, error=error.message)
            self._settle(batch)
            return
        middle = len(batch.records) // 2
        for half in (batch.records[:middle], batch.records[middle:]):
            await self._deliver(self._journaled(list(half)))
        self._settle(batch)

    def _settle(self, batch: RecordBatch) -> None:
        try:
            self._spool.acknowledge(batch)
        except StoreUnavailable as error:
            # At worst the batch is sent again under its id after a restart, and recognised.
            log.warning("acknowledgement not spooled", batch_id=batch.batch_id, error=error.message)
        request_ids = [record.request_id for record in batch.records]
        self._spool.forget(request_ids)
        self._unspooled_ids.difference_update(request_ids)

    async def _delete_finished(self) -> None:
        # Deleting waits for the disk, so not on the event loop.
        for segment in self._spool.take_finished():
            await asyncio.to_thread(segment.delete)

    def _note_silence(self, error: OctavoError) -> None:
        if not self._is_telemetry_silent:
            self._is_telemetry_silent = True
            log.warning("telemetry does not take records; they wait in the spool", error=error.message)
