"""Where an INSERT ends and its data begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.telemetry.embedded_clickhouse.errors import ClickHouseError
from services.telemetry.embedded_clickhouse.statements import InsertWithData, Query, parse_statement


@pytest.mark.parametrize(
    ("target", "settings", "rest", "input_format", "data"),
    [
        (b"INSERT INTO t ", b"", b"FORMAT TSV\n1\t2\n", b"TSV", b"1\t2\n"),
        (b"insert into t (a, b) ", b"", b"format Native\n\x00\n;", b"Native", b"\x00\n;"),
        (b"INSERT INTO t ", b"", b"FORMAT CSV \r\n\n1", b"CSV", b"\n1"),
        (b"INSERT INTO t ", b"", b"FORMAT JSONEachRow {}", b"JSONEachRow", b"{}"),
        (b"INSERT INTO t ", b"", b"VALUES (1), (2)", b"Values", b" (1), (2)"),
        (b"INSERT INTO d.t(a)", b"SETTINGS x = 'FORMAT', y = 1 ", b"VALUES(1)", b"Values", b"(1)"),
        (b"INSERT INTO settings (settings) ", b"settings x = 1\n", b"FORMAT CSV 1", b"CSV", b"1"),
        (b"-- FORMAT no\n/* VALUES */ INSERT INTO t ", b"", b"FORMAT TSV\n", b"TSV", b""),
        (b"INSERT INTO format ", b"", b"FORMAT TSV\nx", b"TSV", b"x"),
        (b"INSERT INTO TABLE d.values (format) ", b"", b"VALUES (1)", b"Values", b" (1)"),
        (b'INSERT INTO "a FORMAT b" ', b"", b"FORMAT TSV\nx", b"TSV", b"x"),
        (b"INSERT INTO FUNCTION file('VALUES') ", b"", b"FORMAT TSV\nx", b"TSV", b"x"),
        (b"INSERT INTO {t:Identifier} ", b"", b"FORMAT TSV\nx", b"TSV", b"x"),
    ],
)
def test_cuts_the_data_off_an_insert(
    target: bytes, settings: bytes, rest: bytes, input_format: bytes, data: bytes
) -> None:
    parsed = parse_statement(target + settings + rest)

    assert parsed == InsertWithData(target, settings, input_format, data)


def test_an_insert_reads_its_rows_from_a_file_before_its_settings() -> None:
    parsed = parse_statement(b"INSERT INTO t (a) SETTINGS x = 1 FORMAT TSV\n1\n")

    assert isinstance(parsed, InsertWithData)
    assert parsed.reading_from("/f") == b"INSERT INTO t (a)  FROM INFILE '/f' SETTINGS x = 1  FORMAT TSV"


@pytest.mark.parametrize(
    ("text", "has_result", "result_format"),
    [
        (b"SELECT 1", True, None),
        (b"SELECT 1 FORMAT JSON", True, "JSON"),
        (b"SELECT ';' AS `a;b`, \"FORMAT x\", $x$ ; $x$ -- ; no\n FORMAT CSV ; -- end", True, "CSV"),
        (b"(SELECT 1)", True, None),
        (b"# comment\nwith 1 as x select x", True, None),
        (b"SHOW TABLES", True, None),
        (b"CREATE TABLE t (a UInt8) ENGINE = Memory", False, None),
        (b"INSERT INTO t SELECT 1 FORMAT TSV", False, "TSV"),
        (b"INSERT INTO t FROM INFILE 'x' FORMAT CSV", False, "CSV"),
        (b"INSERT INTO t WITH 1 AS x SELECT x", False, None),
        (b"INSERT INTO t", False, None),
    ],
)
def test_leaves_other_statements_whole(text: bytes, has_result: bool, result_format: str | None) -> None:
    parsed = parse_statement(text)

    assert parsed == Query(text, has_result, result_format)


@pytest.mark.parametrize(
    "text",
    [
        b"SELECT 1; SELECT 2",
        b"SELECT 1;;SELECT 2",
        b"DROP TABLE a /* ; */ ; DROP TABLE b",
        b"INSERT INTO t; SELECT 2",
        b"INSERT INTO t SELECT 1; SELECT 2",
    ],
)
def test_refuses_a_second_statement(text: bytes) -> None:
    with pytest.raises(ClickHouseError) as caught:
        parse_statement(text)

    assert caught.value.code == 62
    assert caught.value.http_status == 400


@pytest.mark.parametrize("text", [b"", b"  \n", b"-- nothing", b"/* nothing"])
def test_refuses_an_empty_query(text: bytes) -> None:
    with pytest.raises(ClickHouseError, match="Empty query"):
        parse_statement(text)


@given(st.binary(max_size=200))
def test_data_is_never_read_as_part_of_the_statement(data: bytes) -> None:
    parsed = parse_statement(b"INSERT INTO t (a) FORMAT Native\n" + data)

    assert parsed == InsertWithData(b"INSERT INTO t (a) ", b"", b"Native", data)


@given(st.binary(max_size=200))
def test_every_byte_belongs_to_the_statement_or_the_data(text: bytes) -> None:
    try:
        parsed = parse_statement(text)
    except ClickHouseError:
        return  # Empty, or more than one statement.

    if isinstance(parsed, Query):
        assert parsed.text == text
    else:
        assert text.startswith(parsed.target + parsed.settings)
        assert text.endswith(parsed.data)
