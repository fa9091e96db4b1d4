"""The HTTP server under the application: its socket, its connections, and answers to what is no HTTP.

Owns how aiohttp is run. It must not know routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from aiohttp import hdrs, web

from libs.errors import InternalError, InvalidRequest
from services.gateway.http_errors import error_response
from services.gateway.open_connections import OpenConnections

# What every answer says of the server; versions are nobody's business.
SERVER_NAME: Final = "octavo"
# An idle connection is closed after this, also one that never sent a request.
_KEEP_ALIVE_SECONDS: Final = 75.0
_CLOSE_CONNECTIONS_SECONDS: Final = 0.5
_BACKLOG: Final = 1024
# There is no request yet that an answer with a body could belong to.
_TOO_SLOW: Final = (
    f"HTTP/1.1 408 Request Timeout\r\nServer: {SERVER_NAME}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
).encode()


class HttpServer:
    """A listening server."""

    def __init__(
        self,
        app: web.Application,
        host: str,
        port: int,
        *,
        head_timeout_seconds: float,
        max_unread_seconds: float,
        max_connections: int,
        shares_port: bool = False,
    ) -> None:
        """Begin; processes that all share a port get their share of its connections.

        A client loses its connection when the head of a request does not arrive within ``head_timeout_seconds``, or
        when it leaves what is written to it unread for ``max_unread_seconds``; beyond ``max_connections`` idle ones
        are closed, those that have waited longest first.
        """
        self._host = host
        self._port = port
        self._shares_port = shares_port
        self._head_timeout_seconds = head_timeout_seconds
        self._max_unread_seconds = max_unread_seconds
        self._open = OpenConnections(max_connections)
        self._runner = web.AppRunner(
            app,
            # A client that leaves cancels its handler, also while that waits for an engine.
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_CLOSE_CONNECTIONS_SECONDS,
        )
        self._server: asyncio.Server | None = None

    async def start(self) -> tuple[str, int]:
        """Listen and return the address; raises InternalError when it cannot be had."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._connection, self._host, self._port, backlog=_BACKLOG, reuse_port=self._shares_port or None
            )
        except OSError as error:
            raise InternalError(f"Cannot listen on {self._host}:{self._port}: {error.strerror}.") from error
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def hand_over(self, last_requests_seconds: float) -> None:
        """Leave the port to its other processes: take no more connections, and soon no requests on those there are.

        Who has just connected may still send a first request. What has begun goes on.
        """
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(last_requests_seconds)
        manager = self._runner.server
        assert manager is not None, "it has started"
        manager.pre_shutdown()

    async def stop(self) -> None:
        """Close the socket and all connections."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _connection(self) -> web.RequestHandler:
        manager = self._runner.server
        assert manager is not None, "connections come after start"
        return _Connection(
            manager,
            head_timeout_seconds=self._head_timeout_seconds,
            max_unread_seconds=self._max_unread_seconds,
            open_connections=self._open,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            # Errors of handlers are answered and logged by the application; what is left is noise of strangers.
            logger=_SILENT_LOGGER,
            access_log=_SILENT_LOGGER,
            auto_decompress=False,
        )


def take_first_byte_time(request: web.BaseRequest) -> int | None:
    """Return when a request's first byte came, by ``time.monotonic_ns``; None where nobody has seen it."""
    connection = request.protocol
    if not isinstance(connection, _Connection):
        return None
    first_byte_ns, connection.first_byte_ns = connection.first_byte_ns, None
    return first_byte_ns


class _Connection(web.RequestHandler):
    """A connection that answers what is no HTTP in OpenAI's shape too, and knows when a request began to come.

    What is written waits in memory until the client reads it, long after the request has given its place to others;
    so a client that does not read is cut. So is one whose head comes line by line: it has taken no place that
    bounds how many there are.
    """

    __slots__ = (
        "_head_patience",
        "_head_timeout_seconds",
        "_max_unread_seconds",
        "_open",
        "_patience",
        "first_byte_ns",
    )

    # Any: aiohttp's own, passed on as they are.
    def __init__(
        self,
        *arguments: Any,
        head_timeout_seconds: float,
        max_unread_seconds: float,
        open_connections: OpenConnections,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._open = open_connections
        self.first_byte_ns: int | None = None
        self._head_timeout_seconds = head_timeout_seconds
        self._head_patience: asyncio.TimerHandle | None = None
        self._max_unread_seconds = max_unread_seconds
        self._patience: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request of its is being served."""
        return self._current_request is None and not self._messages

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, if there is room or can be made."""
        super().connection_made(transport)
        self._open.add(self)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._patience = self._loop.call_later(self._max_unread_seconds, self._cut)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        self._stop_waiting()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let go."""
        self._stop_waiting()
        self._stop_waiting_for_head()
        self._open.remove(self)
        super().connection_lost(exc)

    def _cut(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first ones while the next request is waited for are its first ones."""
        if self._waiter is not None and self.first_byte_ns is None:
            self.first_byte_ns = time.monotonic_ns()
        super().data_received(data)
        if not self._waits_for_request:
            self._stop_waiting_for_head()
        # Some clients end a body with a line break that is no part of it and begins no head: RFC 9112, section 2.2.
        elif self._head_patience is None and data.strip(b"\r\n"):
            self._head_patience = self._loop.call_later(self._head_timeout_seconds, self._refuse_slow_head)

    @property
    def _waits_for_request(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _refuse_slow_head(self) -> None:
        self._head_patience = None
        if self.transport is not None:
            self.transport.write(_TOO_SLOW)
        self.force_close()

    def _stop_waiting_for_head(self) -> None:
        if self._head_patience is not None:
            self._head_patience.cancel()
            self._head_patience = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that never reached the application."""
        if request.writer.output_size > 0:
            raise ConnectionError("The answer has begun; there is no other.")
        if status < 500:
            response = error_response(InvalidRequest("The request breaks the rules of HTTP."))
        else:
            response = error_response(InternalError("Something went wrong on our side; please try again."))
        # No request reached the application, whose answers say no more of what they were made with.
        response.headers[hdrs.SERVER] = SERVER_NAME
        response.force_close()
        return response


def _silent_logger() -> logging.Logger:
    logger = logging.getLogger("octavo.gateway.http")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    logger.setLevel(logging.CRITICAL)
    return logger


_SILENT_LOGGER: Final = _silent_logger()
