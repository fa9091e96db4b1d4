"""ClickHouse's HTTP interface: what a request means to the engine, and what a client reads back."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from services.telemetry.embedded_clickhouse.app import make_app
from services.telemetry.embedded_clickhouse.config import EmbeddedClickHouseConfig
from services.telemetry.embedded_clickhouse.engine import Engine, EngineCall, EngineResult
from services.telemetry.embedded_clickhouse.errors import ClickHouseError
from services.telemetry.embedded_clickhouse.sessions import SessionRef


class FakeEngine:
    """Keeps the calls and answers all alike."""

    version = "26.9"
    timezone = "UTC"

    def __init__(self) -> None:
        self.calls: list[EngineCall] = []
        self.error: ClickHouseError | None = None

    async def run(self, call: EngineCall) -> EngineResult:
        self.calls.append(call)
        if self.error is not None:
            raise self.error
        return EngineResult(b"answer\n", "TabSeparated", 1, 2, 3, 4, 0.5)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[TestClient[Any, Any]]:
    config = EmbeddedClickHouseConfig(max_body_bytes=1_000, password="secret")
    server = TestServer(make_app(cast(Engine, engine), config))  # The fake has what the app uses.
    headers = {"X-ClickHouse-User": "default", "X-ClickHouse-Key": "secret"}
    async with TestClient(server, headers=headers, auto_decompress=False) as client:
        await client.start_server()
        yield client


async def test_query_settings_parameters_and_data_come_from_url_and_body(
    client: TestClient[Any, Any], engine: FakeEngine
) -> None:
    params = {
        "query": "INSERT INTO t FORMAT TSV",
        "database": "octavo",
        "param_x": "1",
        "max_threads": "2",
        "wait_end_of_query": "1",
        "query_id": "abc",
        "session_id": "s",
        "session_timeout": "5",
    }

    response = await client.post("/", params=params, data=b"1\n")

    assert response.status == 200
    assert engine.calls == [
        EngineCall(
            text=b"INSERT INTO t FORMAT TSV\n1\n",
            database="octavo",
            settings={"max_threads": "2"},
            parameters={"x": "1"},
            default_format="TabSeparated",
            is_read_only=False,
            session=SessionRef("s", 5.0, must_exist=False),
        )
    ]


async def test_the_answer_has_the_headers_that_clients_read(client: TestClient[Any, Any]) -> None:
    response = await client.post("/", params={"query_id": "a b\x01c\u00e9"}, data=b"SELECT 1")

    assert await response.read() == b"answer\n"
    assert response.headers["X-ClickHouse-Query-Id"] == "a bc"
    assert response.headers["X-ClickHouse-Format"] == "TabSeparated"
    assert response.headers["X-ClickHouse-Timezone"] == "UTC"
    assert json.loads(response.headers["X-ClickHouse-Summary"]) == {
        "read_rows": "1",
        "read_bytes": "2",
        "written_rows": "3",
        "written_bytes": "4",
        "elapsed_ns": "500000000",
    }


async def test_a_get_may_only_read(client: TestClient[Any, Any], engine: FakeEngine) -> None:
    await client.get("/", params={"query": "SELECT 1"})
    await client.post("/", data=b"SELECT 1")

    assert [call.is_read_only for call in engine.calls] == [True, False]


async def test_ping_and_an_empty_get_say_ok(client: TestClient[Any, Any], engine: FakeEngine) -> None:
    for path in ("/ping", "/"):
        response = await client.get(path)
        assert (response.status, await response.text()) == (200, "Ok.\n")

    assert engine.calls == []


async def test_an_error_has_its_status_code_and_text(client: TestClient[Any, Any], engine: FakeEngine) -> None:
    engine.error = ClickHouseError.from_engine("Query failed: Code: 60. DB::Exception: No table t. (UNKNOWN_TABLE)")

    response = await client.post("/", data=b"SELECT 1")

    assert response.status == 404
    assert response.headers["X-ClickHouse-Exception-Code"] == "60"
    assert await response.text() == "Code: 60. DB::Exception: No table t. (UNKNOWN_TABLE) (version 26.9)\n"


async def test_a_form_brings_the_query_and_its_parameters(client: TestClient[Any, Any], engine: FakeEngine) -> None:
    form = aiohttp.FormData()
    form.add_field("query", "SELECT {x:String}", content_type="text/plain")
    form.add_field("param_x", "long", content_type="text/plain")

    await client.post("/", data=form)

    (call,) = engine.calls
    assert (call.text, call.parameters, call.settings) == (b"SELECT {x:String}", {"x": "long"}, {})


async def test_a_body_over_the_bound_is_refused(client: TestClient[Any, Any], engine: FakeEngine) -> None:
    form = aiohttp.FormData()
    form.add_field("query", "x" * 1_001, content_type="text/plain")

    plain = await client.post("/", data=b"x" * 1_001)
    packed = await client.post("/", data=gzip.compress(bytes(1_001)), headers={"Content-Encoding": "gzip"})
    in_form = await client.post("/", data=form)

    assert [plain.status, packed.status, in_form.status] == [413, 413, 413]
    assert engine.calls == []


@pytest.mark.parametrize(
    ("params", "status", "part"),
    [
        ({"compress": "1"}, 501, "compress"),
        ({"decompress": "1"}, 501, "decompress"),
        ({"role": "admin"}, 501, "role"),
        ({"quota_key": "k"}, 501, "quota_key"),
        ({"session_id": "s", "session_timeout": "soon"}, 400, "session_timeout"),
        ({"session_id": "s", "session_timeout": "7200"}, 400, "session_timeout"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(
    client: TestClient[Any, Any], engine: FakeEngine, params: dict[str, str], status: int, part: str
) -> None:
    response = await client.post("/", params=params, data=b"SELECT 1")

    assert response.status == status
    assert part in await response.text()
    assert engine.calls == []


async def test_an_external_table_is_refused(client: TestClient[Any, Any], engine: FakeEngine) -> None:
    form = aiohttp.FormData()
    form.add_field("table", b"1\n", filename="table.tsv")

    response = await client.post("/", params={"query": "SELECT 1"}, data=form)

    assert response.status == 501
    assert engine.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        {"X-ClickHouse-Key": "wrong"},
        {"X-ClickHouse-User": "someone"},
        {"X-ClickHouse-Key": ""},
        {"Origin": "http://a.web.page"},
    ],
    ids=["wrong password", "unknown user", "no password", "a web page"],
)
async def test_who_has_no_business_here_is_refused(
    client: TestClient[Any, Any], engine: FakeEngine, headers: dict[str, str]
) -> None:
    response = await client.post("/", headers=headers, data=b"SELECT 1")

    assert response.status == 403
    assert response.headers["X-ClickHouse-Exception-Code"] == "516"
    assert engine.calls == []


async def test_the_password_may_come_by_basic_auth_or_url(engine: FakeEngine) -> None:
    server = TestServer(make_app(cast(Engine, engine), EmbeddedClickHouseConfig(password="secret")))
    async with TestClient(server) as client:
        credentials = base64.b64encode(b"default:secret").decode()
        basic = await client.post("/", headers={"Authorization": f"basic {credentials}"}, data=b"SELECT 1")
        url = await client.post("/", params={"user": "default", "password": "secret"}, data=b"SELECT 1")
        nothing = await client.post("/", data=b"SELECT 1")
        bearer = await client.post("/", headers={"Authorization": "Bearer x"}, data=b"SELECT 1")
        broken = await client.post("/", headers={"Authorization": "Basic \u00e9"}, data=b"SELECT 1")

    assert [basic.status, url.status] == [200, 200]
    assert [nothing.status, bearer.status, broken.status] == [403, 403, 403]
