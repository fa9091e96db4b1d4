"""Records reach telemetry exactly once, whatever dies or refuses in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import structlog.testing

from libs.errors import InvalidRequest, OctavoError, StoreUnavailable
from libs.obs.metrics import GatewayMetrics
from libs.protogen.telemetry.v1 import telemetry_pb2
from libs.spool import read_segments
from services.gateway.accepted_spool import AcceptedSpool
from services.gateway.audit import AuditSettings, AuditTrail
from services.gateway.clients import TelemetryClient
from tests.fakes.fake_telemetry import FakeTelemetry
from tests.unit.gateway.test_accepted_spool import accepted, record

SETTINGS = AuditSettings(gateway_id="gateway-0", flush_seconds=0.01)


@pytest.fixture
async def telemetry() -> AsyncIterator[FakeTelemetry]:
    telemetry = FakeTelemetry()
    await telemetry.start()
    yield telemetry
    await telemetry.stop()


@contextmanager
def open_spool(folder: Path, max_bytes: int = 4 * 1024 * 1024) -> Iterator[AcceptedSpool]:
    spool = AcceptedSpool(folder, max_bytes=max_bytes)
    try:
        yield spool
    finally:
        spool._writer.close()


@asynccontextmanager
async def running(trail: AuditTrail) -> AsyncIterator[None]:
    task = asyncio.create_task(trail.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def ids_of(telemetry: FakeTelemetry) -> list[str]:
    return [kept.request_id for kept in telemetry.records]


async def test_records_arrive_and_the_spool_empties(
    tmp_path: Path, telemetry: FakeTelemetry, metrics: GatewayMetrics
) -> None:
    spool = AcceptedSpool(tmp_path, max_bytes=4 * 1024 * 1024)
    async with TelemetryClient(telemetry.address) as client:
        trail = AuditTrail(spool, client, SETTINGS, metrics)
        async with running(trail):
            for number in range(1200):
                trail.accepted(accepted(f"r-{number}"))
                trail.ended(record(f"r-{number}"))
            await trail.flush(10.0)
    spool.close()

    assert sorted(ids_of(telemetry)) == sorted(f"r-{number}" for number in range(1200))
    assert len(telemetry.batch_ids) == 3
    assert list(read_segments(tmp_path)) == []


async def test_a_record_keeps_its_fields_on_the_way(
    tmp_path: Path, telemetry: FakeTelemetry, metrics: GatewayMetrics
) -> None:
    with open_spool(tmp_path) as spool:
        async with TelemetryClient(telemetry.address) as client:
            trail = AuditTrail(spool, client, SETTINGS, metrics)
            async with running(trail):
                trail.ended(record("a"))
                kept = await telemetry.wait_for("a")

    assert kept.status == telemetry_pb2.REQUEST_STATUS_STOP
    assert (kept.accepted_time.seconds, kept.accepted_time.nanos) == (1700000000, 250_000_000)
    assert kept.ttft.nanos == 250_000_000
    assert not kept.HasField("mean_itl")
    assert (kept.completion_tokens, kept.gateway_id, kept.client_request_id) == (3, "gateway-0", "c")


async def test_records_wait_while_telemetry_is_away(
    tmp_path: Path, telemetry: FakeTelemetry, metrics: GatewayMetrics
) -> None:
    telemetry.error = StoreUnavailable("down")
    with open_spool(tmp_path) as spool:
        async with TelemetryClient(telemetry.address) as client:
            trail = AuditTrail(spool, client, SETTINGS, metrics)
            async with running(trail):
                trail.ended(record("a"))
                await trail.flush(0.3)
                assert ids_of(telemetry) == []
                telemetry.error = None
                await telemetry.wait_for("a")

    assert ids_of(telemetry) == ["a"]


async def test_a_lost_acknowledgement_and_a_crash_do_not_double_a_row(
    tmp_path: Path, telemetry: FakeTelemetry, metrics: GatewayMetrics
) -> None:
    telemetry.error, telemetry.keeps_before_error = StoreUnavailable("lost"), True
    with open_spool(tmp_path) as spool:
        async with TelemetryClient(telemetry.address) as client:
            trail = AuditTrail(spool, client, SETTINGS, metrics)
            async with running(trail):
                trail.accepted(accepted("a"))
                trail.ended(record("a"))
                await telemetry.wait_for("a")
    telemetry.error = None

    with open_spool(tmp_path) as spool:
        async with TelemetryClient(telemetry.address) as client:
            trail = AuditTrail(spool, client, SETTINGS, metrics)
            async with running(trail):
                await trail.flush(10.0)

    assert ids_of(telemetry) == ["a"]
    assert len(set(telemetry.batch_ids)) == 1
    assert len(telemetry.batch_ids) >= 2


async def test_orphans_of_a_dead_process_are_closed_as_gateway_lost(
    tmp_path: Path, telemetry: FakeTelemetry, metrics: GatewayMetrics
) -> None:
    with open_spool(tmp_path) as spool:
        spool.accept(accepted("lost"))

    with open_spool(tmp_path) as spool:
        async with TelemetryClient(telemetry.address) as client:
            trail = AuditTrail(spool, client, SETTINGS, metrics)
            async with running(trail):
                kept = await telemetry.wait_for("lost")

    assert kept.status == telemetry_pb2.REQUEST_STATUS_GATEWAY_LOST
    assert kept.http_status == 0
    assert not kept.HasField("e2e")
    assert metrics.registry.get_sample_value("octavo_gateway_orphans_closed_total") == 1


class RefusesOne(FakeTelemetry):
    """Refuses every batch that holds one poisoned record."""

    def error_for(self, request: telemetry_pb2.IngestEventsRequest) -> OctavoError | None:
        is_poisoned = any(kept.request_id == "poison" for kept in request.records)
        return InvalidRequest("poison") if is_poisoned else None


async def test_a_record_that_is_refused_does_not_take_its_batch_along(
    tmp_path: Path, metrics: GatewayMetrics
) -> None:
    telemetry = RefusesOne()
    await telemetry.start()
    names = [f"r-{number}" for number in range(9)]
    with open_spool(tmp_path) as spool:
        async with TelemetryClient(telemetry.address) as client:
            trail = AuditTrail(spool, client, SETTINGS, metrics)
            for name in [*names[:4], "poison", *names[4:]]:
                trail.ended(record(name))
            async with running(trail):
                await trail.flush(10.0)
    await telemetry.stop()

    assert sorted(ids_of(telemetry)) == names
    assert metrics.registry.get_sample_value("octavo_gateway_audit_records_dropped_total") == 1


async def test_a_full_spool_drops_beyond_its_bound_and_counts(
    tmp_path: Path, telemetry: FakeTelemetry, metrics: GatewayMetrics
) -> None:
    telemetry.error = StoreUnavailable("down")
    with open_spool(tmp_path, max_bytes=2000) as spool, structlog.testing.capture_logs() as logs:
        async with TelemetryClient(telemetry.address) as client:
            trail = AuditTrail(spool, client, SETTINGS, metrics)
            for number in range(1100):
                trail.accepted(accepted(f"r-{number}"))
                trail.ended(record(f"r-{number}"))
            telemetry.error = None
            async with running(trail):
                await trail.flush(10.0)

    dropped = metrics.registry.get_sample_value("octavo_gateway_audit_records_dropped_total")
    assert dropped is not None
    assert dropped > 0
    assert len(set(ids_of(telemetry))) == len(telemetry.records) == 1100 - dropped
    # A line for each request would be written to the same disk.
    assert [entry["event"] for entry in logs].count("accepted requests are not spooled") == 1
