"""The audit's table in ClickHouse, real or embedded, over HTTP.

Owns the connection, the tables, the columns of an insert and the meaning of ClickHouse's error codes. It
tries everything once; when to try again is the pipeline's business.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import clickhouse_connect
from clickhouse_connect.driver.exceptions import ClickHouseError, DataError

from libs.errors import StoreUnavailable
from libs.obs import get_logger
from services.telemetry.audit_record import AuditRecord
from services.telemetry.audit_store import RowsRefused

TABLE: Final = "inference_requests_audit"
DEFAULT_DATABASE: Final = "default"

_TABLES_FILE: Final = "tables.sql"
_CONNECT_SECONDS: Final = 5
_ANSWER_SECONDS: Final = 30
_BUSY_SECONDS: Final = 5.0
_TTL: Final = re.compile(r"TTL toDateTime\(accepted_time\) \+ toIntervalDay\((?:_CAST\()?(\d+)")

# The rows themselves are wrong: they cannot be parsed or converted, or break a constraint of the table.
_REFUSED_CODES: Final = frozenset(
    (6, 26, 27, 33, 38, 41, 43, 53, 69, 70, 72, 117, 131, 190, 321, 349, 376, 395, 469, 691)
)
# The server has too much to do: too many queries (202), too little memory (241), too many parts (252).
_BUSY_CODES: Final = frozenset((202, 241, 252))

_COLUMNS: Final = {
    "request_id": "UUID",
    "client_request_id": "String",
    "tenant_id": "LowCardinality(String)",
    "model_name": "LowCardinality(String)",
    "endpoint": "LowCardinality(String)",
    "is_streaming": "Bool",
    "status": "LowCardinality(String)",
    "error_reason": "LowCardinality(String)",
    "http_status": "UInt16",
    "prompt_tokens": "UInt32",
    "cached_tokens": "UInt32",
    "completion_tokens": "UInt32",
    "discarded_tokens": "UInt32",
    "num_preemptions": "UInt32",
    "num_retries": "UInt32",
    "accepted_time": "DateTime64(3, 'UTC')",
    "finished_time": "Nullable(DateTime64(3, 'UTC'))",
    "ttft_ms": "Nullable(Float64)",
    "itl_ms": "Nullable(Float64)",
    "e2e_ms": "Nullable(Float64)",
    "queue_ms": "Nullable(Float64)",
    "engine_id": "LowCardinality(String)",
    "gateway_id": "LowCardinality(String)",
}
# Durations are seconds inside and milliseconds in the table.
_SECONDS_FIELDS: Final = {
    "ttft_ms": "ttft_seconds",
    "itl_ms": "mean_itl_seconds",
    "e2e_ms": "e2e_seconds",
    "queue_ms": "queue_seconds",
}


class ClickHouseStore:
    """An `AuditStore` in ClickHouse. Connects, and makes what is missing, when first used."""

    def __init__(self, url: str, audit_ttl_days: int) -> None:
        self._url = urlsplit(url)
        self._audit_ttl_days = audit_ttl_days
        self._client: Any = None  # clickhouse-connect's AsyncClient, whose methods are not typed.
        self._log = get_logger("clickhouse_store")

    async def open(self) -> None:
        """Connect and make the table, so that it can be read before the first row; see `AuditStore`."""
        if self._client is None:
            try:
                self._client = await self._connect()
            except (ClickHouseError, OSError) as error:
                address = f"{self._url.hostname}:{self._url.port}"
                raise StoreUnavailable(f"ClickHouse at {address} cannot be used: {error}") from error

    async def insert(self, records: Sequence[AuditRecord], token: str) -> None:
        """Insert records under a token; see `AuditStore`."""
        try:
            if self._client is None:
                self._client = await self._connect()
            await self._client.insert(
                TABLE,
                [_column(name, records) for name in _COLUMNS],
                column_names=list(_COLUMNS),
                column_type_names=list(_COLUMNS.values()),
                column_oriented=True,
                settings={"async_insert": 0, "insert_deduplicate": 1, "insert_deduplication_token": token},
            )
        except DataError as error:
            raise RowsRefused(f"{len(records)} rows cannot be written as columns: {error}") from error
        except (ClickHouseError, OSError) as error:
            raise await self._translated(error) from error

    async def close(self) -> None:
        """Close the connection; the next insert opens a new one."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _connect(self) -> Any:
        url = self._url
        client = await clickhouse_connect.get_async_client(
            interface=url.scheme,
            host=url.hostname,
            port=url.port or 0,
            username=unquote(url.username) if url.username else None,
            password=unquote(url.password) if url.password else "",
            connect_timeout=_CONNECT_SECONDS,
            send_receive_timeout=_ANSWER_SECONDS,
            # Nothing here needs state between calls, and a session allows one call at a time.
            autogenerate_session_id=False,
        )
        try:
            await self._make_tables(client)
        except BaseException:
            await client.close()
            raise
        return client

    async def _make_tables(self, client: Any) -> None:
        database = unquote(self._url.path.strip("/")) or DEFAULT_DATABASE
        await client.command("CREATE DATABASE IF NOT EXISTS {name:Identifier}", parameters={"name": database})
        client.database = database
        for statement in table_statements():
            await client.command(statement, parameters={"audit_ttl_days": self._audit_ttl_days})
        definition = await client.command(
            "SELECT engine_full FROM system.tables WHERE database = currentDatabase() AND name = {name:String}",
            parameters={"name": TABLE},
        )
        ttl = _TTL.search(str(definition))
        if ttl is None:
            self._log.warning("the audit table has a TTL of its own, which is left as it is", table=TABLE)
        elif int(ttl.group(1)) != self._audit_ttl_days:
            self._log.info("changing the audit's TTL", days_before=int(ttl.group(1)), days=self._audit_ttl_days)
            await client.command(
                f"ALTER TABLE {TABLE} MODIFY TTL toDateTime(accepted_time) + toIntervalDay({{days:UInt32}})",
                parameters={"days": self._audit_ttl_days},
            )
        self._log.info("connected to clickhouse", host=self._url.hostname, database=database)

    async def _translated(self, error: Exception) -> RowsRefused | StoreUnavailable:
        code: int | None = getattr(error, "code", None)
        if code in _REFUSED_CODES:
            return RowsRefused(f"ClickHouse refuses the rows: {error}")
        if code in _BUSY_CODES:
            return StoreUnavailable(f"ClickHouse is busy: {error}", retry_after_seconds=_BUSY_SECONDS)
        # Perhaps the server was replaced by an empty one: begin anew, tables and all.
        await self.close()
        return StoreUnavailable(f"ClickHouse at {self._url.hostname}:{self._url.port} failed: {error}")


def table_statements() -> list[str]:
    """Return the statements of tables.sql; `{audit_ttl_days:UInt32}` in them is a query parameter."""
    text = (Path(str(resources.files("services.telemetry"))) / _TABLES_FILE).read_text()
    return [statement for part in text.split(";\n") if (statement := part.strip())]


def _column(name: str, records: Sequence[AuditRecord]) -> list[Any]:
    seconds_field = _SECONDS_FIELDS.get(name)
    if seconds_field is None:
        return [getattr(record, name) for record in records]
    values: list[float | None] = [getattr(record, seconds_field) for record in records]
    return [None if seconds is None else seconds * 1e3 for seconds in values]
