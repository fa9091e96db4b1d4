"""How connections are set up: tokens leave at once, and proxies are told not to hold them back."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from services.gateway.http_server import HttpServer
from services.gateway.open_connections import OpenConnections
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
    server = HttpServer(app, "127.0.0.1", 0, max_unread_seconds=PATIENCE_SECONDS, max_connections=8)
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
    server = HttpServer(app, "127.0.0.1", 0, max_unread_seconds=1.0, max_connections=8)
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


async def test_idle_connections_give_way_to_those_that_ask() -> None:
    """Who opens connections and sends nothing, or a head without an end, keeps nobody else from an answer."""
    goes_on = asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        if request.path == "/slow":
            await goes_on.wait()
        return web.Response(text="done")

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    server = HttpServer(app, "127.0.0.1", 0, max_unread_seconds=PATIENCE_SECONDS, max_connections=4)
    address = await server.start()
    writers: list[asyncio.StreamWriter] = []

    async def ask(path: str) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*address)
        # One that nobody holds is closed.
        writers.append(writer)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return reader

    slow = await ask("/slow")
    await asyncio.sleep(0.05)
    idle = [await asyncio.open_connection(*address) for _ in range(20)]
    for _, writer in idle[-3:]:
        writer.write(b"GET / HTTP/1.1\r\nX: ")
    async with asyncio.timeout(PATIENCE_SECONDS):
        quick = [await (await ask("/quick")).read() for _ in range(8)]
        closed = [await reader.read() for reader, _ in idle[:16]]
        goes_on.set()
        answer = await slow.read()
    await server.stop()
    for writer in (*writers, *(writer for _, writer in idle)):
        writer.close()

    assert all(one.endswith(b"done") for one in quick)
    assert closed == [b""] * 16
    assert answer.endswith(b"done")


class Caller:
    """A connection."""

    def __init__(self, *, is_idle: bool) -> None:
        self.is_idle = is_idle
        self.is_closed = False

    def force_close(self) -> None:
        self.is_closed = True


def test_the_connection_that_has_waited_longest_gives_way_and_else_the_newest() -> None:
    callers = [Caller(is_idle=number != 0) for number in range(3)]
    connections = OpenConnections(3)
    for caller in callers:
        connections.add(caller)

    connections.add(Caller(is_idle=False))
    after_one = [caller.is_closed for caller in callers]
    callers[2].is_idle = False
    refused = Caller(is_idle=False)
    connections.add(refused)

    assert after_one == [False, True, False]
    assert [caller.is_closed for caller in callers] == [False, True, False]
    assert refused.is_closed
