"""The ClickHouse engine of this process: calls run in a bounded pool of threads, off the event loop.

Owns the connections to the engine, sessions, and the bounds on how many queries run and wait. It must not
know HTTP. A connection has settings and a current database of its own and takes 0.4 ms to open, so every
call without a session gets a new one.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from libs.errors import StoreUnavailable
from services.telemetry.embedded_clickhouse.config import EmbeddedClickHouseConfig
from services.telemetry.embedded_clickhouse.errors import (
    BAD_ARGUMENTS,
    RESULT_TOO_LARGE,
    TOO_MANY_QUERIES,
    ClickHouseError,
)
from services.telemetry.embedded_clickhouse.sessions import SessionRef, Sessions
from services.telemetry.embedded_clickhouse.statements import InsertWithData, Query, parse_statement

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOCK_NAME: Final = "octavo.lock"
DEFAULT_FORMAT: Final = "TabSeparated"
# Set on every call, so that no call is without them.
_BOUND_SETTINGS: Final = ("max_execution_time", "max_memory_usage", "max_result_bytes")


@dataclass(frozen=True, slots=True)
class EngineCall:
    """What a client asks of the engine; settings and parameters are the text that it sent."""

    text: bytes
    database: str | None
    settings: Mapping[str, str]
    parameters: Mapping[str, str]
    default_format: str
    is_read_only: bool
    session: SessionRef | None


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What the engine answered; `result_format` is None for a statement that has no result."""

    body: bytes
    result_format: str | None
    read_rows: int
    read_bytes: int
    written_rows: int
    written_bytes: int
    elapsed_seconds: float


class Engine:
    """The engine over one folder. Made by `open_engine`."""

    def __init__(self, config: EmbeddedClickHouseConfig, chdb: Any) -> None:
        self._config = config
        self._chdb = chdb
        self._path = str(Path(config.data_dir).resolve())
        self._sessions = Sessions(clock=time.monotonic)
        self._pool = ThreadPoolExecutor(config.max_concurrent_queries, thread_name_prefix="clickhouse")
        self._num_calls = 0
        # The engine lives as long as one connection to it is open.
        self._keeper = self._connect()
        row = self._keeper.query("SELECT version(), timezone()", DEFAULT_FORMAT).bytes().decode()
        self.version, self.timezone = row.rstrip("\n").split("\t")

    async def run(self, call: EngineCall) -> EngineResult:
        """Run a statement; raises ClickHouseError with the engine's own code and text.

        It runs to its end or to the limit of time even if the caller is cancelled: the engine has no way to
        interrupt it.
        """
        if self._num_calls >= self._config.max_concurrent_queries + self._config.max_waiting_queries:
            raise ClickHouseError.of(TOO_MANY_QUERIES, f"{self._num_calls} queries run or wait; try again later")
        self._num_calls += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._run_in_thread, call)
        future.add_done_callback(self._end_call)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Wait for running queries, then close the engine and its files."""
        self._pool.shutdown(wait=True)
        self._sessions.close()
        self._keeper.close()

    def _end_call(self, future: asyncio.Future[EngineResult]) -> None:
        self._num_calls -= 1
        if not future.cancelled():
            future.exception()  # A caller that left does not ask; without this the loop would complain.

    def _run_in_thread(self, call: EngineCall) -> EngineResult:
        statement = parse_statement(call.text)
        try:
            with ExitStack() as stack:
                connection = self._connection_of(call, stack)
                self._prepare(connection, call)
                if isinstance(statement, InsertWithData):
                    path = stack.enter_context(_file_of(statement.data))
                    statement = Query(statement.reading_from(path), has_result=False, result_format=None)
                return self._query(connection, statement, call)
        except RuntimeError as error:  # Also the class of the engine's own errors.
            raise ClickHouseError.from_engine(str(error)) from error

    def _connection_of(self, call: EngineCall, stack: ExitStack) -> Any:
        if call.session is not None:
            connection = stack.enter_context(self._sessions.use(call.session, self._connect))
            stack.enter_context(_settings_restored(connection, call.settings))
            return connection
        connection = self._connect()
        stack.callback(connection.close)
        return connection

    def _connect(self) -> Any:
        return self._chdb.connect(self._path)

    def _prepare(self, connection: Any, call: EngineCall) -> None:
        if call.database:
            connection.query(f"USE {_quote_identifier(call.database)}", DEFAULT_FORMAT)
        settings = dict(call.settings) | self._bounds(call.settings)
        if call.is_read_only:
            settings["readonly"] = "2"
        assignments = [f"{_checked_name(name)} = {_quote_string(value)}" for name, value in settings.items()]
        connection.query(f"SET {', '.join(assignments)}", DEFAULT_FORMAT)

    def _bounds(self, asked: Mapping[str, str]) -> dict[str, str]:
        """Take the client's bound where it is under ours; 0 means none."""
        config = self._config
        ours = (config.max_query_seconds, config.max_query_memory_bytes, config.max_result_bytes)
        bounds: dict[str, str] = {}
        for name, limit in zip(_BOUND_SETTINGS, ours, strict=True):
            text = asked.get(name, "0")
            try:
                value = float(text)
            except ValueError as error:
                raise ClickHouseError.of(BAD_ARGUMENTS, f"{name} cannot be {text!r}") from error
            bounds[name] = text if 0 < value < limit else str(limit)
        return bounds

    def _query(self, connection: Any, statement: Query, call: EngineCall) -> EngineResult:
        result = connection.query(statement.text, call.default_format, params=dict(call.parameters))
        # The engine's own limit counts a constant column as one value.
        if result.size() > self._config.max_result_bytes:
            raise ClickHouseError.of(
                RESULT_TOO_LARGE,
                f"The result has {result.size()} bytes; the limit is {self._config.max_result_bytes}",
            )
        return EngineResult(
            body=result.bytes(),
            result_format=(statement.result_format or call.default_format) if statement.has_result else None,
            read_rows=result.rows_read(),
            read_bytes=result.bytes_read(),
            written_rows=result.rows_written(),
            written_bytes=result.bytes_written(),
            elapsed_seconds=result.elapsed(),
        )


def open_engine(config: EmbeddedClickHouseConfig) -> Engine:
    """Open the engine on its folder; raises StoreUnavailable when another process has it."""
    data_dir = Path(config.data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    _lock_for_life(data_dir)
    # Half a second and 250 MB: only the process that runs the engine pays for it.
    import chdb.state

    try:
        return Engine(config, chdb.state)
    except RuntimeError as error:
        raise StoreUnavailable(f"the ClickHouse engine cannot open {data_dir}: {error}") from error


@contextmanager
def _file_of(data: bytes) -> Iterator[str]:
    """Give data a path in memory, for as long as the block lasts.

    The engine's streaming insert would need no file, but it swallows errors of the table: of an insert that
    breaks a constraint or meets too many parts it says that all went well.
    """
    with os.fdopen(os.memfd_create("octavo-insert"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


@contextmanager
def _settings_restored(connection: Any, settings: Mapping[str, str]) -> Iterator[None]:
    """Undo on leaving what a call with a session sets for itself only."""
    names = [*settings, *_BOUND_SETTINGS]
    quoted = ", ".join(_quote_string(_checked_name(name)) for name in names)
    rows = connection.query(
        f"SELECT name, value FROM system.settings WHERE changed AND name IN ({quoted})", "JSONEachRow"
    )
    earlier = {row["name"]: row["value"] for row in map(json.loads, rows.bytes().splitlines())}
    try:
        yield
    finally:
        for name in names:
            value = _quote_string(earlier[name]) if name in earlier else "DEFAULT"
            try:
                connection.query(f"SET {name} = {value}", DEFAULT_FORMAT)
            except RuntimeError:
                # A setting that the engine refused above is refused here too; it was never set.
                continue


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ClickHouseError.of(BAD_ARGUMENTS, f"{name!r} cannot be the name of a setting or parameter")
    return name


def _quote_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _quote_identifier(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("`", "\\`")
    return f"`{escaped}`"


def _lock_for_life(data_dir: Path) -> None:
    """Take the folder until this process ends; the file is never closed."""
    fd = os.open(data_dir / _LOCK_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StoreUnavailable(
            f"another process uses the ClickHouse folder {data_dir}; stop it or choose another --data-dir"
        ) from error
