"""The path of a record: every fault of the store, and still each record once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from libs.errors import OctavoError, Overloaded, StoreUnavailable
from libs.obs.metrics import TelemetryMetrics
from libs.spool import SpoolWriter, read_segments
from services.telemetry.audit_pipeline import MAX_WAITING_BATCHES, AuditPipeline, PipelineSettings
from services.telemetry.audit_record import AuditRecord, decode_records
from services.telemetry.audit_spool import AuditSpool, DeadLetters
from tests.fakes.fake_audit_store import FakeAuditStore, Fault, make_batch

NEVER_SECONDS = 3600.0
SOON_SECONDS = 0.01


@asynccontextmanager
async def run_pipeline(
    directory: Path,
    store: FakeAuditStore,
    *,
    flush_interval_seconds: float = SOON_SECONDS,
    batch_max_rows: int = 1_000,
    shutdown_flush_seconds: float = 10.0,
    spool_max_bytes: int = 1 << 20,
    dead_letters_max_bytes: int = 1 << 20,
) -> AsyncIterator[AuditPipeline]:
    settings = PipelineSettings(
        flush_interval_seconds=flush_interval_seconds,
        batch_max_rows=batch_max_rows,
        shutdown_flush_seconds=shutdown_flush_seconds,
        min_insert_gap_seconds=0.0,
        min_backoff_seconds=0.001,
    )
    pipeline = AuditPipeline(
        AuditSpool(directory, max_bytes=spool_max_bytes, clock=time.time),
        DeadLetters(directory / "dead_letters", max_bytes=dead_letters_max_bytes, clock=time.time),
        store,
        settings,
        TelemetryMetrics(CollectorRegistry()),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pipeline.run())
        yield pipeline
        pipeline.stop()


def metric(pipeline: AuditPipeline, name: str, **labels: str) -> float:
    return pipeline._metrics.registry.get_sample_value(f"octavo_telemetry_{name}", labels) or 0.0


async def take_until_refused(pipeline: AuditPipeline, taken: list[AuditRecord]) -> None:
    for _ in range(100):
        batch = make_batch()
        await pipeline.take(batch)
        taken.extend(batch.records)


def dead_letters(directory: Path) -> list[AuditRecord]:
    header_bytes = 25
    return [
        record
        for segment in read_segments(directory / "dead_letters")
        for data in segment.records()
        for record in decode_records(data[header_bytes:])
    ]


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [Fault.DOWN, Fault.DOWN, Fault.DOWN],
        [Fault.BUSY, Fault.BUSY],
        [Fault.COMMIT_THEN_DROP],
        [Fault.DOWN, Fault.COMMIT_THEN_DROP, Fault.BUSY, Fault.COMMIT_THEN_DROP],
    ],
    ids=["no fault", "down then up", "too many parts", "commit then drop", "all"],
)
async def test_each_record_arrives_once_whatever_the_store_does(tmp_path: Path, faults: list[Fault]) -> None:
    """MET-09."""
    store = FakeAuditStore(faults)
    batches = [make_batch(7) for _ in range(3)]

    async with run_pipeline(tmp_path, store) as pipeline:
        for batch in batches:
            assert await pipeline.take(batch) is True

    assert store.rows == [record for batch in batches for record in batch.records]
    assert store.is_closed
    assert metric(pipeline, "rows_inserted_total") == 21
    assert metric(pipeline, "insert_failures_total") == len(faults)
    assert metric(pipeline, "spool_bytes") == 0
    assert metric(pipeline, "spool_lag_seconds") == 0


async def test_the_same_batch_twice_is_written_once(tmp_path: Path) -> None:
    store = FakeAuditStore()
    batch = make_batch(4)

    async with run_pipeline(tmp_path, store) as pipeline:
        assert await pipeline.take(batch) is True
        assert await pipeline.take(batch) is False
        await store.wait_for_rows(4)
        assert await pipeline.take(batch) is False

    assert store.rows == list(batch.records)
    assert metric(pipeline, "batches_total", outcome="duplicate") == 2


@pytest.mark.parametrize("num_poison", [1, 2, 8])
async def test_only_the_rows_that_the_store_refuses_are_set_aside(tmp_path: Path, num_poison: int) -> None:
    """MET-09."""
    batch = make_batch(8)
    poison = frozenset(record.request_id for record in batch.records[-num_poison:])
    store = FakeAuditStore(poison=poison)

    async with run_pipeline(tmp_path, store) as pipeline:
        await pipeline.take(batch)

    assert store.rows == list(batch.records[:-num_poison])
    assert dead_letters(tmp_path) == list(batch.records[-num_poison:])
    assert metric(pipeline, "rows_dead_lettered_total") == num_poison
    assert metric(pipeline, "spool_bytes") == 0


async def test_what_was_written_or_set_aside_before_the_store_went_away_is_not_again(tmp_path: Path) -> None:
    """Else each outage would count rows twice and fill the dead letters with the same ones."""
    batch = make_batch(8)
    first, last = batch.records[0], batch.records[-1]
    # The first row is set aside, the second is in; then the store goes away, for each of the rest once.
    store = FakeAuditStore(poison=frozenset([first.request_id, last.request_id]))
    goes_away_at = iter((5, 7, 9))
    insert, away_at = store.insert, next(goes_away_at)

    async def flapping_insert(records: Sequence[AuditRecord], token: str) -> None:
        nonlocal away_at
        if store.num_attempts == away_at:
            away_at = next(goes_away_at, -1)
            store.faults.insert(0, Fault.DOWN)
        await insert(records, token)

    store.insert = flapping_insert  # type: ignore[method-assign]
    async with run_pipeline(tmp_path, store) as pipeline:
        await pipeline.take(batch)

    assert store.rows == list(batch.records[1:-1])
    assert metric(pipeline, "insert_failures_total") == 3
    assert metric(pipeline, "rows_inserted_total") == 6
    assert dead_letters(tmp_path) == [first, last]
    assert metric(pipeline, "rows_dead_lettered_total") == 2


async def test_what_the_disk_has_damaged_is_told_once_however_long_the_store_is_away(tmp_path: Path) -> None:
    store = FakeAuditStore([Fault.DOWN] * 3)
    batches = [make_batch(2) for _ in range(3)]
    spool = AuditSpool(tmp_path, max_bytes=1 << 20, clock=time.time)
    for batch in batches:
        spool.append(batch)
    spool.close()
    (segment,) = read_segments(tmp_path / "batches")
    content = bytearray(segment.path.read_bytes())
    content[len(content) // 2] ^= 1
    segment.path.write_bytes(content)

    async with run_pipeline(tmp_path, store) as pipeline:
        await store.wait_for_rows(4)

    assert store.rows == [*batches[0].records, *batches[2].records]
    assert metric(pipeline, "spool_lost_bytes_total") == len(content) / 3


async def test_a_record_that_cannot_be_set_aside_stays_in_the_spool(tmp_path: Path) -> None:
    batch = make_batch(2)
    store = FakeAuditStore(poison=frozenset([batch.records[0].request_id]))

    async with run_pipeline(tmp_path, store, dead_letters_max_bytes=10, shutdown_flush_seconds=0) as pipeline:
        await pipeline.take(batch)
        await store.wait_for_attempts(4)
    store.poison = frozenset()
    async with run_pipeline(tmp_path, store):
        await store.wait_for_rows(2)

    assert sorted(store.rows, key=batch.records.index) == list(batch.records)


async def test_a_full_insert_does_not_wait_for_the_interval(tmp_path: Path) -> None:
    """MET-09."""
    store = FakeAuditStore()

    async with run_pipeline(tmp_path, store, flush_interval_seconds=NEVER_SECONDS, batch_max_rows=10) as pipeline:
        await pipeline.take(make_batch(10))
        await store.wait_for_rows(10)
        await pipeline.take(make_batch(25))
        await store.wait_for_rows(35)

    assert store.insert_sizes == [10, 10, 10, 5]


async def test_shutdown_flushes_what_the_interval_had_not(tmp_path: Path) -> None:
    """MET-08."""
    store = FakeAuditStore()
    batch = make_batch(100)

    async with run_pipeline(tmp_path, store, flush_interval_seconds=NEVER_SECONDS) as pipeline:
        await pipeline.take(batch)
        assert store.rows == []

    assert store.rows == list(batch.records)


async def test_what_shutdown_cannot_flush_arrives_after_the_next_start(tmp_path: Path) -> None:
    store = FakeAuditStore()
    store.is_down = True
    batch = make_batch(5)
    async with run_pipeline(tmp_path, store, shutdown_flush_seconds=0.01) as pipeline:
        await pipeline.take(batch)
    assert metric(pipeline, "spool_bytes") > 0
    store.is_down = False

    async with run_pipeline(tmp_path, store, flush_interval_seconds=NEVER_SECONDS) as pipeline:
        await store.wait_for_rows(5)
        assert await pipeline.take(batch) is False

    assert store.rows == list(batch.records)


async def test_a_crash_between_insert_and_confirmation_writes_no_row_twice(tmp_path: Path) -> None:
    """MET-09."""
    # After the commit the store is gone for good, as seen by this process: it never learns of the commit.
    store = FakeAuditStore([Fault.COMMIT_THEN_DROP, *[Fault.DOWN] * 1_000])
    batch = make_batch(5)
    async with run_pipeline(tmp_path, store, shutdown_flush_seconds=0) as pipeline:
        await pipeline.take(batch)
        await store.wait_for_attempts(2)
    store.faults.clear()
    num_attempts = store.num_attempts

    async with run_pipeline(tmp_path, store):
        await store.wait_for_attempts(num_attempts + 1)

    assert store.rows == list(batch.records)


async def test_a_full_spool_refuses_and_the_rest_still_arrives(tmp_path: Path) -> None:
    """MET-09."""
    store = FakeAuditStore()
    store.is_down = True
    taken: list[AuditRecord] = []

    async with run_pipeline(tmp_path, store, spool_max_bytes=4_000) as pipeline:
        with pytest.raises(StoreUnavailable, match="at most 4000 bytes"):
            await take_until_refused(pipeline, taken)
        assert metric(pipeline, "batches_total", outcome="refused") == 1
        store.is_down = False

    assert len(taken) > 1
    assert store.rows == taken


async def test_a_disk_that_is_behind_refuses_instead_of_piling_up(tmp_path: Path) -> None:
    store = FakeAuditStore()

    async with run_pipeline(tmp_path, store) as pipeline:
        outcomes = await asyncio.gather(
            *(pipeline.take(make_batch()) for _ in range(MAX_WAITING_BATCHES + 5)), return_exceptions=True
        )

    refused = [one for one in outcomes if isinstance(one, OctavoError)]
    assert len(refused) == 5
    assert all(isinstance(one, Overloaded) and one.retry_after_seconds for one in refused)
    assert len(store.rows) == MAX_WAITING_BATCHES


async def test_a_batch_in_an_unknown_format_is_set_aside_and_the_others_pass(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "batches", max_bytes=1 << 20, segment_bytes=1 << 20, fsync=False) as writer:
        writer.append(b"\x63 from another version, with a header long enough")
    store = FakeAuditStore()
    batch = make_batch(2)

    async with run_pipeline(tmp_path, store) as pipeline:
        await pipeline.take(batch)

    assert store.rows == list(batch.records)
    assert metric(pipeline, "rows_dead_lettered_total") == 1
    (segment,) = read_segments(tmp_path / "dead_letters")
    assert segment.records() == [b"\x63 from another version, with a header long enough"]
