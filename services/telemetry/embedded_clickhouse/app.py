"""ClickHouse's HTTP interface: from a request to an `EngineCall`, from a result to a response.

Owns the meaning of URL parameters, headers and bodies. It must not know how the engine runs a statement.
"""

from __future__ import annotations

import base64
import hmac
import json
import uuid
from collections.abc import Mapping
from typing import Final

from aiohttp import MultipartReader, web

from libs.hosts import is_private_name
from libs.obs import get_logger
from services.telemetry.embedded_clickhouse.bodies import decode_body
from services.telemetry.embedded_clickhouse.config import EmbeddedClickHouseConfig
from services.telemetry.embedded_clickhouse.engine import DEFAULT_FORMAT, Engine, EngineCall, EngineResult
from services.telemetry.embedded_clickhouse.errors import (
    AUTHENTICATION_FAILED,
    BAD_ARGUMENTS,
    NOT_IMPLEMENTED,
    TOO_LARGE,
    ClickHouseError,
)
from services.telemetry.embedded_clickhouse.sessions import SessionRef

# Parameters of the transport that this server meets by what it is: results are complete before they are
# sent, progress is never sent, compression and a newer protocol are offers that need not be taken.
_MET_PARAMETERS: Final = frozenset((
    "wait_end_of_query",
    "buffer_size",
    "send_progress_in_http_headers",
    "http_headers_progress_interval_ms",
    "enable_http_compression",
    "client_protocol_version",
    "cancel_http_readonly_queries_on_client_close",
))  # fmt: skip
_OWN_PARAMETERS: Final = frozenset((
    "query",
    "database",
    "user",
    "password",
    "query_id",
    "default_format",
    "session_id",
    "session_timeout",
    "session_check",
))  # fmt: skip
# These would change what happens; leaving them out would be a lie.
_REFUSED_PARAMETERS: Final = ("compress", "decompress", "role", "quota_key", "stacktrace")
_DEFAULT_SESSION_SECONDS: Final = 60.0
_MAX_SESSION_SECONDS: Final = 3600.0
_USER: Final = "default"


def make_app(engine: Engine, config: EmbeddedClickHouseConfig) -> web.Application:
    """Build the application; its handlers run in the event loop, its queries do not."""
    handler = _Handler(engine, config)
    app = web.Application(client_max_size=config.max_body_bytes)
    app.router.add_get("/ping", handler.ping)
    app.router.add_get("/", handler.handle)
    app.router.add_post("/", handler.handle)
    return app


class _Handler:
    def __init__(self, engine: Engine, config: EmbeddedClickHouseConfig) -> None:
        self._engine = engine
        self._config = config
        self._log = get_logger("embedded_clickhouse")

    async def ping(self, request: web.Request) -> web.Response:
        return web.Response(text="Ok.\n")

    async def handle(self, request: web.Request) -> web.Response:
        query_id = request.query.get("query_id") or str(uuid.uuid4())
        headers = {
            "X-ClickHouse-Server-Display-Name": "octavo",
            "X-ClickHouse-Query-Id": _header_text(query_id),
            "X-ClickHouse-Timezone": self._engine.timezone,
        }
        try:
            self._authenticate(request)
            call = await self._read_call(request)
            if call is None:
                return web.Response(text="Ok.\n", headers=headers)
            result = await self._engine.run(call)
        except ClickHouseError as error:
            self._log.debug("query failed", query_id=query_id, code=error.code, error=error.text)
            headers["X-ClickHouse-Exception-Code"] = str(error.code)
            text = f"{error.text} (version {self._engine.version})\n"
            return web.Response(text=text, status=error.http_status, headers=headers)
        return _response(result, headers)

    def _authenticate(self, request: web.Request) -> None:
        if "Origin" in request.headers or not is_private_name(request.headers.get("Host", "")):
            # Any web page may make a browser send such a request; no client of ours is a page. What a page asks of
            # its own site has no origin, so a site whose name points here is told by that name.
            raise ClickHouseError.of(AUTHENTICATION_FAILED, "Requests from web pages are refused")
        user, password = _credentials(request)
        if user != _USER or not hmac.compare_digest(password.encode(), self._config.password.encode()):
            raise ClickHouseError.of(
                AUTHENTICATION_FAILED,
                f"{user}: the password is wrong, or there is no such user",
            )

    async def _read_call(self, request: web.Request) -> EngineCall | None:
        body, form = await self._read_body(request)
        values = {**request.query, **form}
        for name in _REFUSED_PARAMETERS:
            if values.get(name, "0") not in ("", "0"):
                raise ClickHouseError.of(NOT_IMPLEMENTED, f"The embedded ClickHouse does not support {name!r}")
        query = values.get("query", "").encode("utf-8", "surrogatepass")
        text = b"\n".join(part for part in (query, body) if part)
        if not text and request.method == "GET":
            return None
        is_read_only = request.method == "GET"
        session = _session(values)
        if session is not None and is_read_only:
            raise ClickHouseError.of(NOT_IMPLEMENTED, "A call with session_id must be a POST")
        return EngineCall(
            text=text,
            database=values.get("database") or request.headers.get("X-ClickHouse-Database"),
            settings=_settings(values),
            parameters={k.removeprefix("param_"): v for k, v in values.items() if k.startswith("param_")},
            default_format=values.get("default_format")
            or request.headers.get("X-ClickHouse-Format")
            or DEFAULT_FORMAT,
            is_read_only=is_read_only,
            session=session,
        )

    async def _read_body(self, request: web.Request) -> tuple[bytes, dict[str, str]]:
        """Read the body: bytes, or the text fields of a form (how long queries with parameters come)."""
        max_bytes = self._config.max_body_bytes
        try:
            if request.content_type == "multipart/form-data":
                return b"", await _read_form(await request.multipart(), max_bytes)
            body = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise ClickHouseError.of(TOO_LARGE, f"The body is over {max_bytes} bytes; send less at once") from error
        return decode_body(body, request.headers.get("Content-Encoding", ""), max_bytes), {}


async def _read_form(reader: MultipartReader, max_bytes: int) -> dict[str, str]:
    fields: dict[str, str] = {}
    num_bytes = 0
    while (part := await reader.next()) is not None:
        if isinstance(part, MultipartReader) or part.filename is not None or part.name is None:
            raise ClickHouseError.of(NOT_IMPLEMENTED, "External tables are not supported; insert into a table")
        value = bytearray()
        while chunk := await part.read_chunk():
            value += chunk
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise ClickHouseError.of(TOO_LARGE, f"The form is over {max_bytes} bytes; send less at once")
        fields[part.name] = value.decode("utf-8", "replace")
    return fields


def _response(result: EngineResult, headers: dict[str, str]) -> web.Response:
    headers["X-ClickHouse-Summary"] = json.dumps(
        {
            "read_rows": str(result.read_rows),
            "read_bytes": str(result.read_bytes),
            "written_rows": str(result.written_rows),
            "written_bytes": str(result.written_bytes),
            "elapsed_ns": str(int(result.elapsed_seconds * 1e9)),
        }
    )
    if result.result_format is not None:
        headers["X-ClickHouse-Format"] = result.result_format
    content_type = "application/json" if result.result_format in ("JSON", "JSONCompact") else "text/plain"
    if result.result_format in ("Native", "RowBinary", "Arrow", "ArrowStream", "Parquet"):
        content_type = "application/octet-stream"
    return web.Response(body=result.body, headers=headers, content_type=content_type)


def _settings(values: Mapping[str, str]) -> dict[str, str]:
    """Keep what is neither ours nor the transport's: these are settings of the engine."""
    named = _OWN_PARAMETERS | _MET_PARAMETERS | frozenset(_REFUSED_PARAMETERS)
    return {k: v for k, v in values.items() if k not in named and not k.startswith("param_")}


def _session(values: Mapping[str, str]) -> SessionRef | None:
    session_id = values.get("session_id")
    if not session_id:
        return None
    asked = values.get("session_timeout") or _DEFAULT_SESSION_SECONDS
    try:
        timeout_seconds = float(asked)
    except ValueError as error:
        raise ClickHouseError.of(BAD_ARGUMENTS, f"session_timeout must be a number, not {asked!r}") from error
    if not 0 < timeout_seconds <= _MAX_SESSION_SECONDS:
        raise ClickHouseError.of(BAD_ARGUMENTS, f"session_timeout must be at most {_MAX_SESSION_SECONDS}")
    return SessionRef(session_id, timeout_seconds, must_exist=values.get("session_check", "0") == "1")


def _credentials(request: web.Request) -> tuple[str, str]:
    """Read user and password from wherever ClickHouse allows them: headers, Basic auth, the URL."""
    header_user = request.headers.get("X-ClickHouse-User")
    if header_user is not None:
        return header_user, request.headers.get("X-ClickHouse-Key", "")
    authorization = request.headers.get("Authorization")
    if authorization is not None:
        scheme, _, credentials = authorization.partition(" ")
        try:
            user, _, password = base64.b64decode(credentials, validate=True).decode().partition(":")
        except ValueError as error:
            raise ClickHouseError.of(AUTHENTICATION_FAILED, "The Authorization header cannot be read") from error
        if scheme.lower() != "basic":
            raise ClickHouseError.of(AUTHENTICATION_FAILED, "Only Basic authorization is supported")
        return user, password
    return request.query.get("user", _USER), request.query.get("password", "")


def _header_text(text: str) -> str:
    """Make text safe in a header: printable ASCII, not long."""
    return "".join(char for char in text if " " <= char <= "~")[:200]
