"""How connections are set up: tokens leave at once, and proxies are told not to hold them back."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from services.gateway.http_server import HttpServer
from services.gateway.sse import HEADERS


async def test_what_is_written_is_sent_at_once() -> None:
    found: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection: socket.socket = request.transport.get_extra_info("socket")
        found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", handle)
    server = HttpServer(app, "127.0.0.1", 0)
    host, port = await server.start()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await server.stop()

    assert found == [1]


def test_streams_tell_proxies_to_pass_them_on() -> None:
    assert HEADERS["Content-Type"] == "text/event-stream; charset=utf-8"
    assert HEADERS["Cache-Control"] == "no-cache"
    assert HEADERS["X-Accel-Buffering"] == "no"
