"""A peer of ClickHouseStore in memory, with faults on demand, and records to put into it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import Enum, auto
from uuid import UUID, uuid4

from libs.errors import StoreUnavailable
from services.telemetry.audit_record import AuditBatch, AuditRecord, BatchId, RequestStatus
from services.telemetry.audit_store import RowsRefused

_RECORD = AuditRecord(
    request_id=UUID(int=0),
    client_request_id="",
    tenant_id="tenant",
    model_name="smollm2-135m-instruct",
    endpoint="/v1/chat/completions",
    is_streaming=True,
    status=RequestStatus.STOP,
    error_reason="",
    http_status=200,
    prompt_tokens=12,
    cached_tokens=0,
    completion_tokens=34,
    discarded_tokens=1,
    num_preemptions=0,
    num_retries=0,
    accepted_time=datetime(2026, 5, 17, 12, 30, 0, 125_000, tzinfo=UTC),
    finished_time=datetime(2026, 5, 17, 12, 30, 2, 250_000, tzinfo=UTC),
    ttft_seconds=0.25,
    mean_itl_seconds=0.03125,
    e2e_seconds=2.125,
    queue_seconds=0.0625,
    engine_id="engine-0",
    gateway_id="gateway-0",
)


def make_record(**changes: object) -> AuditRecord:
    """Make a record with an id of its own."""
    # dataclasses.replace checks the names; the types are the test's own care.
    return replace(_RECORD, **{"request_id": uuid4(), **changes})  # type: ignore[arg-type]


def make_batch(num_records: int = 1) -> AuditBatch:
    """Make a batch of new records."""
    return AuditBatch(BatchId(uuid4()), tuple(make_record() for _ in range(num_records)))


class Fault(Enum):
    """What happens to one insert."""

    DOWN = auto()
    BUSY = auto()
    # The store has the rows, its answer is lost.
    COMMIT_THEN_DROP = auto()


class FakeAuditStore:
    """Keeps rows by insert token, as ClickHouse does; each fault in `faults` meets one insert."""

    def __init__(self, faults: Sequence[Fault] = (), poison: frozenset[UUID] = frozenset()) -> None:
        self.faults = list(faults)
        self.poison = poison
        self.is_down = False
        self.is_closed = False
        self.num_attempts = 0
        self.rows: list[AuditRecord] = []
        self.insert_sizes: list[int] = []
        self.changed = asyncio.Condition()
        self._tokens: set[str] = set()

    async def open(self) -> None:
        """Nothing to make."""

    async def insert(self, records: Sequence[AuditRecord], token: str) -> None:
        """Insert, or meet the next fault."""
        fault = self.faults.pop(0) if self.faults else None
        self.num_attempts += 1
        try:
            if self.is_down or fault is Fault.DOWN:
                raise StoreUnavailable("the fake store is down")
            if fault is Fault.BUSY:
                raise StoreUnavailable("too many parts", retry_after_seconds=0.01)
            if any(record.request_id in self.poison for record in records):
                raise RowsRefused(f"{len(records)} rows, one of them poison")
            if token not in self._tokens:
                self._tokens.add(token)
                self.rows.extend(records)
                self.insert_sizes.append(len(records))
            if fault is Fault.COMMIT_THEN_DROP:
                raise StoreUnavailable("the connection broke before the answer")
        finally:
            async with self.changed:
                self.changed.notify_all()

    async def close(self) -> None:
        """Note that it was closed."""
        self.is_closed = True

    async def wait_for_rows(self, num_rows: int) -> None:
        """Return when at least so many rows are in."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.rows) >= num_rows)

    async def wait_for_attempts(self, num_attempts: int) -> None:
        """Return when at least so many inserts were tried."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_attempts >= num_attempts)
