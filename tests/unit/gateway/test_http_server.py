"""How connections are set up: tokens leave at once, and proxies are told not to hold them back."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from libs.errors import InvalidRequest
from services.gateway.http_body import BodyLimits, read_json_body
from services.gateway.http_server import HttpServer
from services.gateway.open_connections import OpenConnections
from services.gateway.sse import HEADERS
from tests.patience import PATIENCE_SECONDS


def server_of(
    app: web.Application,
    *,
    head_timeout_seconds: float = PATIENCE_SECONDS,
    max_unread_seconds: float = PATIENCE_SECONDS,
    max_connections: int = 8,
) -> HttpServer:
    return HttpServer(
        app,
        "127.0.0.1",
        0,
        head_timeout_seconds=head_timeout_seconds,
        max_unread_seconds=max_unread_seconds,
        max_connections=max_connections,
    )


async def test_what_is_written_is_sent_at_once() -> None:
    found: list[int] = []

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        connection: socket.socket = request.transport.get_extra_info("socket")
        found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return web.Response()

    app = web.Application()
    app.router.add_get("/", handle)
    server = server_of(app)
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
    server = server_of(app, max_unread_seconds=1.0)
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


async def test_a_head_that_comes_too_slowly_is_refused_and_an_idle_connection_is_not() -> None:
    """Slowloris: a line now and then, and no end."""

    async def handle(request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.Response(text="done")

    app = web.Application()
    app.router.add_get("/", handle)
    server = server_of(app, head_timeout_seconds=0.2)
    address = await server.start()
    question = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    slow_reader, slow_writer = await asyncio.open_connection(*address)
    reader, writer = await asyncio.open_connection(*address)
    slow_writer.write(b"GET / HTTP/1.1\r\n")

    async def send_lines() -> None:
        while not slow_reader.at_eof():
            slow_writer.write(b"X-Line: 1\r\n")
            await asyncio.sleep(0.02)

    async with asyncio.timeout(PATIENCE_SECONDS):
        sending = asyncio.create_task(send_lines())
        refusal = await slow_reader.read()
        await sending
        answers = []
        for _ in range(2):
            # Idle for longer than a head may take, and then a handler that takes longer too.
            await asyncio.sleep(0.3)
            writer.write(question)
            answers.append(await reader.readuntil(b"done"))
    for each in (writer, slow_writer):
        each.close()
    await server.stop()

    assert refusal.startswith(b"HTTP/1.1 408 ")
    assert b"Connection: close" in refusal
    assert [answer.startswith(b"HTTP/1.1 200 ") for answer in answers] == [True, True]


async def test_a_body_that_trickles_is_refused() -> None:
    limits = BodyLimits(max_bytes=1_000_000, timeout_seconds=0.2)
    refused: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        try:
            await read_json_body(request, limits, lambda: None)
        except InvalidRequest as error:
            refused.append(error.message)
        return web.Response(status=400)

    app = web.Application()
    app.router.add_post("/", handle)
    server = server_of(app)
    reader, writer = await asyncio.open_connection(*await server.start())
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not refused:
            writer.write(b" ")
            await asyncio.sleep(0.02)
        answer = await reader.readline()
    writer.close()
    await server.stop()

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert refused == ["The body did not arrive within 0.2 seconds."]


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
    server = server_of(app, max_connections=4)
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
