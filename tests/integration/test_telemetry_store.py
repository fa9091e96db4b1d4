"""Audit records from the wire to the real store, through real processes that are stopped, killed and late."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from libs.errors import InvalidRequest, StoreUnavailable
from libs.protogen.telemetry.v1 import telemetry_pb2, telemetry_pb2_grpc
from libs.rpc import make_channel, unary
from services.telemetry.audit_record import AuditRecord
from services.telemetry.clickhouse_store import ClickHouseStore
from tests.fakes.fake_audit_store import make_record as make_audit_record
from tests.integration.telemetry_processes import (
    READY_SECONDS,
    ClickHouseProcess,
    TelemetryProcess,
    closing_process,
    wait_until_equal,
)

# Young enough that no TTL of these tests reaches it.
ACCEPTED = datetime.now(UTC).replace(microsecond=125_000)
NOT_SOON = ("--flush-interval-seconds", "10")
SOON = ("--flush-interval-seconds", "0.1")


@pytest.fixture(scope="module")
def clickhouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseProcess]:
    process = ClickHouseProcess(tmp_path_factory.mktemp("clickhouse"))
    with closing_process(process):
        yield process


@pytest.fixture
def database() -> str:
    """Name a database of the test's own."""
    return f"audit_{uuid4().hex}"


def make_record(**values: object) -> telemetry_pb2.RequestRecord:
    record = telemetry_pb2.RequestRecord(
        request_id=str(uuid4()),
        tenant_id="tenant",
        model_name="smollm2-135m-instruct",
        endpoint="/v1/chat/completions",
        status=telemetry_pb2.REQUEST_STATUS_STOP,
        http_status=200,
        prompt_tokens=12,
        completion_tokens=34,
        gateway_id="gateway-0",
    )
    record.accepted_time.FromDatetime(ACCEPTED)
    for name, value in values.items():
        setattr(record, name, value)
    return record


def make_batch(num_records: int) -> telemetry_pb2.IngestEventsRequest:
    records = [make_record() for _ in range(num_records)]
    return telemetry_pb2.IngestEventsRequest(batch_id=str(uuid4()), records=records)


async def ingest(telemetry: TelemetryProcess, *batches: telemetry_pb2.IngestEventsRequest) -> list[bool]:
    """Send batches as a gateway does; return which of them telemetry had taken before."""
    async with make_channel(telemetry.address) as channel:
        async with asyncio.timeout(READY_SECONDS):
            await channel.channel_ready()
        stub = telemetry_pb2_grpc.TelemetryServiceStub(channel)
        answers = [
            await unary(stub.IngestEvents, batch, timeout_seconds=READY_SECONDS, on_lost=StoreUnavailable)
            for batch in batches
        ]
    return [answer.is_duplicate for answer in answers]


def count_rows(clickhouse: ClickHouseProcess, database: str) -> str:
    """Count requests, ids and the table's own rows; an answer that has no count is given as it is."""
    sql = (
        "SELECT count(), uniqExact(request_id), (SELECT count() FROM inference_requests_audit)"
        " FROM inference_requests"
    )
    return clickhouse.query(sql, params={"database": database}).strip()


def rows(num_rows: int) -> str:
    return f"{num_rows}\t{num_rows}\t{num_rows}"


async def test_what_was_acknowledged_is_in_the_store_after_sigterm(
    clickhouse: ClickHouseProcess, database: str, tmp_path: Path
) -> None:
    """MET-08."""
    telemetry = TelemetryProcess(tmp_path, f"{clickhouse.url}/{database}", *NOT_SOON)
    with closing_process(telemetry):
        await ingest(telemetry, *(make_batch(10) for _ in range(10)))

        status = telemetry.stop()

    assert status == 0
    assert count_rows(clickhouse, database) == rows(100)


async def test_a_batch_is_taken_once_also_over_a_restart(
    clickhouse: ClickHouseProcess, database: str, tmp_path: Path
) -> None:
    batch = make_batch(5)
    url = f"{clickhouse.url}/{database}"
    telemetry = TelemetryProcess(tmp_path, url, *SOON)
    with closing_process(telemetry):
        before = await ingest(telemetry, batch, batch)
        telemetry.stop()
    telemetry = TelemetryProcess(tmp_path, url, *SOON)
    with closing_process(telemetry):
        after = await ingest(telemetry, batch)
        telemetry.stop()

    assert before == [False, True]
    assert after == [True]
    assert count_rows(clickhouse, database) == rows(5)


async def test_what_was_acknowledged_survives_kill_minus_nine(
    clickhouse: ClickHouseProcess, database: str, tmp_path: Path
) -> None:
    url = f"{clickhouse.url}/{database}"
    telemetry = TelemetryProcess(tmp_path, url, *NOT_SOON)
    with closing_process(telemetry):
        await ingest(telemetry, *(make_batch(7) for _ in range(5)))
        telemetry.kill()

    telemetry = TelemetryProcess(tmp_path, url, *NOT_SOON)
    with closing_process(telemetry):
        wait_until_equal(lambda: count_rows(clickhouse, database), rows(35))


async def test_records_wait_for_a_store_that_starts_late_and_for_one_that_was_killed(
    database: str, tmp_path: Path
) -> None:
    """MET-09."""
    port = free_port()
    telemetry = TelemetryProcess(tmp_path / "telemetry", f"http://127.0.0.1:{port}/{database}", *SOON)
    with closing_process(telemetry):
        await ingest(telemetry, make_batch(3))

        clickhouse = ClickHouseProcess(tmp_path / "clickhouse", port=port)
        with closing_process(clickhouse):
            wait_until_equal(lambda: count_rows(clickhouse, database), rows(3))
            clickhouse.kill()
        await ingest(telemetry, make_batch(4))
        clickhouse = ClickHouseProcess(tmp_path / "clickhouse", port=port)
        with closing_process(clickhouse):
            wait_until_equal(lambda: count_rows(clickhouse, database), rows(7))
            assert telemetry.stop() == 0
            assert clickhouse.stop() == 0


@pytest.fixture(scope="module")
def telemetry(
    clickhouse: ClickHouseProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TelemetryProcess]:
    """Run a telemetry process for the tests that do not stop it; they tell their rows apart by tenant."""
    process = TelemetryProcess(tmp_path_factory.mktemp("telemetry"), f"{clickhouse.url}/audit_shared", *SOON)
    with closing_process(process):
        yield process


def read_tenant(clickhouse: ClickHouseProcess, tenant_id: str, what: str = "*") -> str:
    sql = f"SELECT {what} FROM inference_requests WHERE tenant_id = {{tenant_id:String}} FORMAT JSONEachRow"
    return clickhouse.query(sql, params={"database": "audit_shared", "param_tenant_id": tenant_id})


def count_tenant(clickhouse: ClickHouseProcess, tenant_id: str) -> int | None:
    """Count a tenant's requests; None while there is no table."""
    answer = read_tenant(clickhouse, tenant_id, "count() AS n")
    return int(json.loads(answer)["n"]) if answer.startswith("{") else None


async def test_a_real_end_wins_over_a_lost_gateway_whichever_comes_first(
    clickhouse: ClickHouseProcess, telemetry: TelemetryProcess
) -> None:
    lost_first, lost_last = make_record(tenant_id="lost"), make_record(tenant_id="lost")
    steps = [(lost_first, "GATEWAY_LOST"), (lost_last, "STOP"), (lost_first, "STOP"), (lost_last, "GATEWAY_LOST")]

    for number, (record, status) in enumerate(steps):
        record.status = telemetry_pb2.RequestStatus.Value(f"REQUEST_STATUS_{status}")
        marker = make_record(tenant_id=f"marker-{number}")
        await ingest(telemetry, telemetry_pb2.IngestEventsRequest(batch_id=str(uuid4()), records=[record, marker]))
        # Each step is an insert of its own.
        wait_until_equal(partial(count_tenant, clickhouse, marker.tenant_id), 1)

    assert read_tenant(clickhouse, "lost", "status") == '{"status":"stop"}\n' * 2


async def test_a_record_is_in_the_table_as_it_was_sent(
    clickhouse: ClickHouseProcess, telemetry: TelemetryProcess
) -> None:
    record = make_record(
        tenant_id="as sent",
        client_request_id="client '\t\\ é",
        is_streaming=True,
        status=telemetry_pb2.REQUEST_STATUS_ERROR,
        error_reason="ENGINE_LOST",
        cached_tokens=1,
        discarded_tokens=2,
        num_preemptions=3,
        num_retries=4,
        engine_id="engine-0",
    )
    finished = ACCEPTED + timedelta(seconds=2)
    record.finished_time.FromDatetime(finished)
    record.ttft.FromMicroseconds(250_500)
    record.e2e.FromMilliseconds(2_000)
    record.queue_duration.FromMilliseconds(0)

    await ingest(telemetry, telemetry_pb2.IngestEventsRequest(batch_id=str(uuid4()), records=[record]))
    wait_until_equal(lambda: count_tenant(clickhouse, "as sent"), 1)

    assert json.loads(read_tenant(clickhouse, "as sent")) == {
        "request_id": record.request_id,
        "client_request_id": "client '\t\\ é",
        "tenant_id": "as sent",
        "model_name": "smollm2-135m-instruct",
        "endpoint": "/v1/chat/completions",
        "is_streaming": True,
        "status": "error",
        "error_reason": "ENGINE_LOST",
        "http_status": 200,
        "prompt_tokens": 12,
        "cached_tokens": 1,
        "completion_tokens": 34,
        "discarded_tokens": 2,
        "num_preemptions": 3,
        "num_retries": 4,
        "accepted_time": f"{ACCEPTED:%Y-%m-%d %H:%M:%S}.125",
        "finished_time": f"{finished:%Y-%m-%d %H:%M:%S}.125",
        "ttft_ms": 250.5,
        "itl_ms": None,
        "e2e_ms": 2000,
        "queue_ms": 0,
        "engine_id": "engine-0",
        "gateway_id": "gateway-0",
    }


async def test_only_a_row_that_breaks_the_table_stays_out(
    clickhouse: ClickHouseProcess, telemetry: TelemetryProcess
) -> None:
    """MET-09."""
    await ingest(telemetry, make_batch(1))
    table = "audit_shared.inference_requests_audit"
    wait_until_equal(lambda: clickhouse.query(f"EXISTS {table}"), "1\n")
    clickhouse.query(f"ALTER TABLE {table} ADD CONSTRAINT no_more CHECK num_retries < 1000")
    records = [make_record(tenant_id="poison", num_retries=1000 if number == 4 else 0) for number in range(9)]

    await ingest(telemetry, telemetry_pb2.IngestEventsRequest(batch_id=str(uuid4()), records=records))

    wait_until_equal(lambda: count_tenant(clickhouse, "poison"), 8)


async def test_a_wrong_batch_is_refused_with_the_name_of_the_field(telemetry: TelemetryProcess) -> None:
    with pytest.raises(InvalidRequest, match="must be a UUID") as caught:
        await ingest(telemetry, telemetry_pb2.IngestEventsRequest(batch_id="1", records=[make_record()]))

    assert caught.value.param == "batch_id"


@pytest.fixture
async def store(clickhouse: ClickHouseProcess, database: str) -> AsyncIterator[ClickHouseStore]:
    store = ClickHouseStore(f"{clickhouse.url}/{database}", audit_ttl_days=30)
    yield store
    await store.close()


def make_audit_records(num_records: int) -> list[AuditRecord]:
    return [make_audit_record(accepted_time=ACCEPTED) for _ in range(num_records)]


async def test_an_insert_is_taken_once_by_its_token_and_a_request_shown_once_by_its_id(
    clickhouse: ClickHouseProcess, database: str, store: ClickHouseStore
) -> None:
    """MET-09."""
    records = make_audit_records(10)

    await store.insert(records, "token-1")
    await store.insert(records, "token-1")
    by_token = count_rows(clickhouse, database)
    clickhouse.query("SYSTEM STOP MERGES inference_requests_audit", params={"database": database})
    await store.insert(records[:5], "token-2")
    by_id = count_rows(clickhouse, database)

    assert by_token == rows(10)
    assert by_id == "10\t10\t15"


async def test_the_ttl_of_the_configuration_reaches_a_table_that_exists(
    clickhouse: ClickHouseProcess, database: str, store: ClickHouseStore
) -> None:
    await store.insert(make_audit_records(1), "token-1")
    later = ClickHouseStore(f"{clickhouse.url}/{database}", audit_ttl_days=60)

    await later.insert(make_audit_records(1), "token-2")
    await later.close()

    sql = (
        "SELECT extract(engine_full, 'toIntervalDay[^0-9]+([0-9]+)') FROM system.tables"
        " WHERE database = currentDatabase() AND name = 'inference_requests_audit'"
    )
    assert clickhouse.query(sql, params={"database": database}) == "60\n"
    assert count_rows(clickhouse, database) == rows(2)


async def test_too_many_parts_ask_for_patience(
    clickhouse: ClickHouseProcess, database: str, store: ClickHouseStore
) -> None:
    """MET-09."""
    await store.insert(make_audit_records(1), "token-1")
    clickhouse.query(
        "ALTER TABLE inference_requests_audit MODIFY SETTING parts_to_throw_insert = 1, parts_to_delay_insert = 1",
        params={"database": database},
    )

    with pytest.raises(StoreUnavailable, match="TOO_MANY_PARTS") as caught:
        await store.insert(make_audit_records(1), "token-2")

    assert caught.value.retry_after_seconds


async def test_tables_that_vanished_are_made_again(
    clickhouse: ClickHouseProcess, database: str, store: ClickHouseStore
) -> None:
    await store.insert(make_audit_records(1), "token-1")
    clickhouse.query(f"DROP DATABASE {database} SYNC")
    records = make_audit_records(2)

    with pytest.raises(StoreUnavailable, match="UNKNOWN_DATABASE"):
        await store.insert(records, "token-2")
    await store.insert(records, "token-2")

    assert count_rows(clickhouse, database) == rows(2)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
