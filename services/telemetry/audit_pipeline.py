"""The path of an audit record: taken from a gateway, kept on disk, written to the store, forgotten.

Reads straight down: `take` is the way in, `run` the way out. Owns when to flush, how fast, when to try again
and what becomes of rows that the store refuses. It must not know the wire or ClickHouse.

Bounds: an insert has at most `batch_max_rows` rows and at most `MAX_INSERTS_PER_SECOND` start in a second;
waits between attempts double up to `MAX_BACKOFF_SECONDS`; attempts have no limit, since the spool has one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from libs.errors import OctavoError, Overloaded, StoreUnavailable
from libs.obs import get_logger
from libs.obs.metrics import TelemetryMetrics
from services.telemetry.audit_record import AuditBatch, AuditRecord, insert_token
from services.telemetry.audit_spool import AuditSpool, DeadLetters, SealedBatches
from services.telemetry.audit_store import AuditStore, RowsRefused

MAX_INSERTS_PER_SECOND: Final = 5
MIN_BACKOFF_SECONDS: Final = 0.25
MAX_BACKOFF_SECONDS: Final = 5.0
MAX_WAITING_BATCHES: Final = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How the pipeline flushes."""

    flush_interval_seconds: float
    batch_max_rows: int
    shutdown_flush_seconds: float
    min_insert_gap_seconds: float = 1 / MAX_INSERTS_PER_SECOND
    min_backoff_seconds: float = MIN_BACKOFF_SECONDS


class AuditPipeline:
    """Takes batches and brings each record to the store, once. To be made inside the event loop."""

    def __init__(
        self,
        spool: AuditSpool,
        dead_letters: DeadLetters,
        store: AuditStore,
        settings: PipelineSettings,
        metrics: TelemetryMetrics,
    ) -> None:
        self._spool = spool
        self._dead_letters = dead_letters
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._log = get_logger("audit_pipeline")
        # The spool waits for the disk and wants one caller at a time.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="audit-spool")
        self._num_waiting = 0
        self._num_new_rows = 0
        self._has_work = asyncio.Event()
        self._is_stopping = asyncio.Event()
        # Has no deadline until `stop` gives it one.
        self._limit = asyncio.timeout(None)
        self._next_insert_time = 0.0
        # What of the file at hand is in the store, set aside or told: a next try begins where this one failed.
        self._handled: set[str | bytes] = set()

    async def take(self, batch: AuditBatch) -> bool:
        """Make a batch durable; return False if it had been taken before.

        Raises StoreUnavailable when the spool is full, Overloaded when the disk is behind.
        """
        if self._num_waiting >= MAX_WAITING_BATCHES:
            self._metrics.batches.labels("refused").inc()
            raise Overloaded(
                f"{self._num_waiting} batches wait for the disk; send it again", retry_after_seconds=1.0
            )
        self._num_waiting += 1
        try:
            is_new = await self._on_disk_thread(partial(self._spool.append, batch))
        except StoreUnavailable:
            self._metrics.batches.labels("refused").inc()
            raise
        finally:
            self._num_waiting -= 1
        self._metrics.batches.labels("taken" if is_new else "duplicate").inc()
        if is_new:
            self._num_new_rows += len(batch.records)
            if self._num_new_rows >= self._settings.batch_max_rows:
                self._has_work.set()
        return is_new

    async def run(self) -> None:
        """Flush at every interval, or as soon as there is a full insert, until `stop`; then a last time."""
        try:
            async with self._limit:
                is_last = False
                while not is_last:
                    # A flush that began before `stop` may have missed what was taken since.
                    is_last = self._is_stopping.is_set()
                    await self._flush_until_done()
                    if not self._is_stopping.is_set():
                        await _wait(self._has_work, self._settings.flush_interval_seconds)
        except TimeoutError:
            size_bytes = await self._on_disk_thread(lambda: self._spool.size_bytes)
            self._log.warning("records stay in the spool for the next start", spool_bytes=size_bytes)
        await self._on_disk_thread(self._spool.close)
        await self._on_disk_thread(self._dead_letters.close)
        self._disk.shutdown(wait=True)
        await self._store.close()

    def stop(self) -> None:
        """Let `run` flush a last time and end, within `shutdown_flush_seconds`; the rest stays in the spool.

        To be called when `take` is called no more.
        """
        self._is_stopping.set()
        self._has_work.set()
        self._limit.reschedule(asyncio.get_running_loop().time() + self._settings.shutdown_flush_seconds)

    async def _flush_until_done(self) -> None:
        """Bring all that is in the spool to the store, however long the store is away."""
        backoff_seconds = self._settings.min_backoff_seconds
        while True:
            try:
                await self._flush()
            except OctavoError as error:
                self._metrics.insert_failures.inc()
                wait_seconds = max(backoff_seconds, error.retry_after_seconds or 0.0)
                self._log.warning("flush failed", error=error.message, retry_in_seconds=wait_seconds)
                backoff_seconds = min(2 * backoff_seconds, MAX_BACKOFF_SECONDS)
                await self._report()
                await self._back_off(wait_seconds)
            else:
                await self._report()
                return

    async def _back_off(self, seconds: float) -> None:
        """Wait; a stop cuts the wait short, since its time is better used to try once more."""
        if self._is_stopping.is_set():
            await asyncio.sleep(seconds)
        else:
            await _wait(self._is_stopping, seconds)

    async def _flush(self) -> None:
        """Send every sealed file of the spool and forget it when the store has it."""
        self._has_work.clear()
        self._num_new_rows = 0
        segments = await self._on_disk_thread(self._spool.seal)
        if segments or not self._is_stopping.is_set():
            await self._store.open()
        for segment in segments:
            batches = await self._on_disk_thread(partial(self._spool.read, segment))
            await self._send(batches)
            await self._on_disk_thread(partial(self._spool.confirm, batches))
            self._handled.clear()

    async def _send(self, batches: SealedBatches) -> None:
        path = str(batches.segment.path)
        if batches.num_lost_bytes and path not in self._handled:
            self._handled.add(path)
            self._metrics.spool_lost_bytes.inc(batches.num_lost_bytes)
            self._log.error(
                "batches that were taken are damaged on the disk; check it",
                file=path,
                num_bytes=batches.num_lost_bytes,
            )
        num_rows = self._settings.batch_max_rows
        for start in range(0, len(batches.records), num_rows):
            await self._insert(batches.records[start : start + num_rows])
        for data in batches.undecodable:
            if data not in self._handled:
                await self._set_aside(partial(self._dead_letters.add_raw, data), "it cannot be decoded", None)
                self._handled.add(data)

    async def _insert(self, records: Sequence[AuditRecord]) -> None:
        """Insert records; when the store refuses some, find them by halving and set them aside."""
        token = insert_token(records)
        if token in self._handled:
            return
        await self._wait_for_turn()
        try:
            with self._metrics.insert_seconds.time():
                await self._store.insert(records, token)
        except RowsRefused as error:
            if len(records) == 1:
                await self._set_aside(partial(self._dead_letters.add, records[0]), str(error), records[0])
                self._handled.add(token)
                return
            middle = len(records) // 2
            await self._insert(records[:middle])
            await self._insert(records[middle:])
        else:
            self._metrics.rows_inserted.inc(len(records))
            self._handled.add(token)

    async def _set_aside(self, add: Callable[[], None], reason: str, record: AuditRecord | None) -> None:
        await self._on_disk_thread(add)
        self._metrics.rows_dead_lettered.inc()
        request_id = None if record is None else str(record.request_id)
        self._log.error("record set aside", reason=reason, request_id=request_id)

    async def _wait_for_turn(self) -> None:
        now = time.monotonic()
        await asyncio.sleep(max(0.0, self._next_insert_time - now))
        self._next_insert_time = max(now, self._next_insert_time) + self._settings.min_insert_gap_seconds

    async def _report(self) -> None:
        self._metrics.spool_bytes.set(await self._on_disk_thread(lambda: self._spool.size_bytes))
        self._metrics.spool_lag.set(await self._on_disk_thread(lambda: self._spool.lag_seconds))

    async def _on_disk_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
