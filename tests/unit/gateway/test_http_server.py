"""How connections are set up: tokens leave at once, and proxies are told not to hold them back."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from services.gateway.http_server import HttpServer
from services.gateway.sse import HEADERS
from tests.patience import PATIENCE_SECONDS


async def test_what_is_written_is_sent_at_once() -> None:
    found: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection: socket.socket = request.transport.get_extra_info("socket")
        found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", handle)
    server = HttpServer(app, "127.0.0.1", 0, max_unread_seconds=PATIENCE_SECONDS)
    host, port = await server.start()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await server.stop()

    assert found == [1]


async def test_a_client_that_does_not_read_its_answer_is_cut_and_one_that_reads_is_not() -> None:
    """A whole answer waits in memory for its client, with no request left that bounds how many there are."""
    body, question = b"x" * 30_000_000, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    connections: list[web.RequestHandler] = []

    async def handle(request: web.Request) -> web.Response:
        connections.append(request.protocol)
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/", handle)
    server = HttpServer(app, "127.0.0.1", 0, max_unread_seconds=1.0)
    address = await server.start()
    deaf = socket.create_connection(address)
    deaf.sendall(question)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(question)
    read = await reader.read()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while any(connection.transport is not None for connection in connections):
            await asyncio.sleep(0.02)
    deaf.close()
    writer.close()
    await server.stop()

    assert read.endswith(body)
    assert len(connections) == 2


def test_streams_tell_proxies_to_pass_them_on() -> None:
    assert HEADERS["Content-Type"] == "text/event-stream; charset=utf-8"
    assert HEADERS["Cache-Control"] == "no-cache"
    assert HEADERS["X-Accel-Buffering"] == "no"
