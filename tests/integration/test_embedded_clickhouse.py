"""The embedded ClickHouse as its clients see it, and what it keeps when it is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import clickhouse_connect
import pytest
from clickhouse_connect.driver.exceptions import DatabaseError

from tests.integration.telemetry_processes import ClickHouseProcess, closing_process, wait_until_equal

COLUMNS = {
    "number": "UInt64",
    "name": "LowCardinality(String)",
    "score": "Nullable(Float64)",
    "at": "DateTime64(3, 'UTC')",
    "id": "UUID",
}
CREATE = f"({', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())}) ENGINE = MergeTree ORDER BY number"


@pytest.fixture(scope="module")
def clickhouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseProcess]:
    process = ClickHouseProcess(
        tmp_path_factory.mktemp("clickhouse"),
        *("--max-concurrent-queries", "2", "--max-waiting-queries", "2", "--max-result-bytes", "5000000"),
    )
    with closing_process(process):
        yield process


def make_columns(num_rows: int) -> list[list[object]]:
    now = datetime(2026, 5, 17, 12, 30, 0, 125_000, tzinfo=UTC)
    return [
        list(range(num_rows)),
        ["even" if number % 2 == 0 else "odd" for number in range(num_rows)],
        [None if number % 3 == 0 else number / 4 for number in range(num_rows)],
        [now] * num_rows,
        [uuid4() for _ in range(num_rows)],
    ]


def to_columns(rows: Sequence[Sequence[object]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("compress", [False, "lz4", "zstd", "gzip"])
def test_the_synchronous_client_writes_reads_and_learns_of_errors(
    clickhouse: ClickHouseProcess, compress: str | bool
) -> None:
    columns = make_columns(1_000)
    with clickhouse_connect.get_client(dsn=clickhouse.url, compress=compress, tz_mode="aware") as client:
        client.command(f"CREATE OR REPLACE TABLE of_sync {CREATE}")

        summary = client.insert("of_sync", columns, column_names=list(COLUMNS), column_oriented=True)
        read = client.query(
            "SELECT * FROM of_sync WHERE number < {limit:UInt64} AND name IN {names:Array(String)} ORDER BY number",
            parameters={"limit": 500, "names": ["even", "o'dd\t\\"]},
        )
        with pytest.raises(DatabaseError) as caught:
            client.query("SELECT nothing_like_it FROM of_sync")

    assert summary.written_rows == 1_000
    assert [list(column) for column in zip(*read.result_rows, strict=True)] == [
        column[:500:2] for column in columns
    ]
    assert (caught.value.code, caught.value.name) == (47, "UNKNOWN_IDENTIFIER")


async def test_the_asynchronous_client_writes_and_reads(clickhouse: ClickHouseProcess) -> None:
    columns = make_columns(100)
    client = await clickhouse_connect.get_async_client(dsn=clickhouse.url, tz_mode="aware")
    try:
        await client.command(f"CREATE OR REPLACE TABLE of_async {CREATE}")
        await client.insert(
            "of_async",
            columns,
            column_names=list(COLUMNS),
            column_type_names=list(COLUMNS.values()),
            column_oriented=True,
            settings={"async_insert": 0},
        )
        # Longer than a URL may be, so that the client sends a form.
        long = await client.query("SELECT length({text:String})", parameters={"text": "x" * 50_000})
        rows = await client.query("SELECT * FROM of_async ORDER BY number")
        empty = await client.command("SELECT number FROM of_async WHERE number > 1000")
    finally:
        await client.close()

    assert to_columns(rows.result_rows) == columns
    assert long.result_rows == [(50_000,)]
    assert empty == ""


def test_data_of_any_size_in_any_format_arrives_whole(clickhouse: ClickHouseProcess) -> None:
    # The engine reads no more than 256 KiB of data that stands in the statement.
    clickhouse.query(
        "CREATE OR REPLACE TABLE of_text (number UInt64, text String) ENGINE = MergeTree ORDER BY number"
    )
    lines = [json.dumps({"number": number, "text": f"; {number} \\' --"}) for number in range(20_000)]

    clickhouse.query("INSERT INTO of_text FORMAT JSONEachRow", "\n".join(lines).encode())
    clickhouse.query("", b"INSERT INTO of_text VALUES (20000, upper('x'))")

    counted = clickhouse.query("SELECT count(), uniqExact(text), max(number), anyIf(text, number = 7) FROM of_text")
    assert counted == "20001\t20001\t20000\t; 7 \\\\\\' --\n"


@pytest.mark.parametrize(
    ("sql", "data", "name"),
    [
        ("INSERT INTO of_faults FORMAT TSV", b"10\n", "VIOLATED_CONSTRAINT"),
        ("INSERT INTO of_faults VALUES", b"(10)", "VIOLATED_CONSTRAINT"),
        ("INSERT INTO of_faults FORMAT TSV", b"not a number\n", "CANNOT_PARSE_INPUT_ASSERTION_FAILED"),
        ("INSERT INTO of_faults FORMAT TSV", b"1\n" * 100_000 + b"x", "CANNOT_PARSE_INPUT_ASSERTION_FAILED"),
        ("INSERT INTO of_faults SETTINGS no_such = 1 FORMAT TSV", b"1\n", "UNKNOWN_SETTING"),
        ("INSERT INTO of_parts FORMAT TSV", b"1\n", "TOO_MANY_PARTS"),
    ],
)
def test_an_insert_that_the_table_refuses_fails_and_leaves_nothing(
    clickhouse: ClickHouseProcess, sql: str, data: bytes, name: str
) -> None:
    clickhouse.query(
        "CREATE OR REPLACE TABLE of_faults (a UInt8, CONSTRAINT small CHECK a < 10) ENGINE = MergeTree ORDER BY a"
    )
    clickhouse.query(
        "CREATE OR REPLACE TABLE of_parts (a UInt8) ENGINE = MergeTree ORDER BY a"
        " SETTINGS parts_to_throw_insert = 1, parts_to_delay_insert = 1"
    )
    clickhouse.query("INSERT INTO of_parts FORMAT TSV", b"1\n")

    status, text = clickhouse.request(sql, data)

    assert status >= 400
    assert name in text
    assert clickhouse.query("SELECT (SELECT count() FROM of_faults), (SELECT count() FROM of_parts)") == "0\t1\n"


def test_a_session_keeps_its_tables_but_not_the_settings_of_one_call(clickhouse: ClickHouseProcess) -> None:
    session = {"session_id": "session-1"}
    clickhouse.query("CREATE TEMPORARY TABLE of_session (a UInt8)", params=session)
    clickhouse.query("SET max_block_size = 1234", params=session)

    of_call = clickhouse.query("SELECT getSetting('max_block_size')", params={"max_block_size": "77", **session})
    of_session = clickhouse.query("SELECT getSetting('max_block_size'), count() FROM of_session", params=session)
    status, of_another = clickhouse.request("SELECT count() FROM of_session", params={"session_id": "session-2"})

    assert (of_call, of_session) == ("77\n", "1234\t0\n")
    assert status == 404
    assert "UNKNOWN_TABLE" in of_another


@pytest.mark.parametrize("headers", [{"Origin": "http://example.com"}, {"Host": "example.com"}])
def test_web_pages_get_nothing(clickhouse: ClickHouseProcess, headers: dict[str, str]) -> None:
    request = urllib.request.Request(f"{clickhouse.url}/?query=SELECT%201", headers=headers)

    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)

    assert refused.value.code == 403


def test_a_get_cannot_write(clickhouse: ClickHouseProcess) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{clickhouse.url}/?query=CREATE%20TABLE%20of_get%20(a%20UInt8)%20ENGINE=Memory")

    assert caught.value.code == 403
    assert caught.value.headers["X-ClickHouse-Exception-Code"] == "164"


@pytest.mark.parametrize(
    ("sql", "status", "name"),
    [
        ("SELECT repeat('x', 1000) FROM numbers(10000)", 500, "TOO_MANY_ROWS_OR_BYTES"),
        ("SELECT number FROM numbers(10000000) SETTINGS max_result_bytes = 1000", 500, "TOO_MANY_ROWS_OR_BYTES"),
        ("SELEC 1", 400, "SYNTAX_ERROR"),
        ("SELECT 1; SELECT 2", 400, "SYNTAX_ERROR"),
        ("SELECT 1 SETTINGS no_such_setting = 1", 404, "UNKNOWN_SETTING"),
        ("INSERT INTO nowhere FORMAT TSV", 404, "UNKNOWN_TABLE"),
    ],
)
def test_what_fails_says_why(clickhouse: ClickHouseProcess, sql: str, status: int, name: str) -> None:
    answer = clickhouse.request(sql)

    assert answer[0] == status
    assert f"({name})" in answer[1]
    assert clickhouse.query("SELECT 1") == "1\n"


def test_more_queries_than_may_wait_are_refused_at_once(clickhouse: ClickHouseProcess) -> None:
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda _: clickhouse.request("SELECT sleep(0.5)"), range(12)))

    statuses = Counter(status for status, _ in answers)
    assert set(statuses) == {200, 503}
    assert statuses[200] >= 4
    assert all("TOO_MANY_SIMULTANEOUS_QUERIES" in text for status, text in answers if status == 503)


def test_committed_rows_survive_kill_minus_nine(tmp_path: Path) -> None:
    process = ClickHouseProcess(tmp_path)
    with closing_process(process):
        process.query("CREATE TABLE t (a UInt64) ENGINE = MergeTree ORDER BY a")
        for number in range(20):
            process.query("INSERT INTO t FORMAT TSV", f"{number}\n".encode(), {"async_insert": "0"})
        process.kill()

    process = ClickHouseProcess(tmp_path)
    with closing_process(process):
        assert process.query("SELECT count(), sum(a) FROM t") == "20\t190\n"


def test_a_second_process_on_the_folder_is_refused_in_one_clear_line(tmp_path: Path) -> None:
    process = ClickHouseProcess(tmp_path)
    with closing_process(process):
        with pytest.raises(AssertionError, match="did not start"):
            ClickHouseProcess(tmp_path)
        assert "another process uses the ClickHouse folder" in (tmp_path / "process.log").read_text()
        assert process.query("SELECT 1") == "1\n"


def test_sigterm_lets_a_running_query_finish_and_exits_zero(tmp_path: Path) -> None:
    process = ClickHouseProcess(tmp_path)
    answers: list[tuple[int, str]] = []
    with closing_process(process):
        running = threading.Thread(target=lambda: answers.append(process.request("SELECT sleep(1)")))
        running.start()
        wait_until_equal(lambda: process.query("SELECT count() FROM system.processes"), "2\n")

        process.process.send_signal(signal.SIGTERM)
        running.join()
        status = process.process.wait(30)

    assert answers == [(200, "0\n")]
    assert status == 0


def test_curl_gets_an_answer(clickhouse: ClickHouseProcess) -> None:
    assert urlsplit(clickhouse.url).hostname == "127.0.0.1"
    curl = subprocess.run(
        ["curl", "-sS", clickhouse.url, "--data-binary", "SELECT 1 AS one FORMAT JSONEachRow"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert curl.stdout == '{"one":1}\n'
