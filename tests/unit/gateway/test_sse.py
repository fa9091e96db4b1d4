"""The writer of streams, against a real server and clients that read, leave or do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import orjson
import pytest
from aiohttp import web

from libs.errors import DeadlineExceeded, EngineLost, OctavoError
from services.gateway.event_template import json_text
from services.gateway.sse import PING, SseWriter, event
from tests.patience import PATIENCE_SECONDS

Write = Callable[[SseWriter], Awaitable[web.StreamResponse]]


class Server:
    """Serves one path with a given use of a writer and keeps the error that it ended with."""

    def __init__(self, *, timeout_seconds: float = 10.0) -> None:
        self.timeout_seconds = timeout_seconds
        self.write: Write | None = None
        self.error: BaseException | None = None
        self.has_ended = asyncio.Event()
        self.port = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert self.write is not None
        deadline = asyncio.get_running_loop().time() + self.timeout_seconds
        writer = SseWriter(request, deadline=deadline)
        try:
            try:
                return await self.write(writer)
            except OctavoError as error:
                self.error = error
                return await writer.fail(error)
        except (ConnectionError, asyncio.CancelledError) as error:
            self.error = self.error or error
            raise
        finally:
            self.has_ended.set()

    async def get(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection, ask, and read nothing yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**16)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return reader, writer


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


async def test_a_good_stream_ends_with_done(server: Server) -> None:
    async def write(writer: SseWriter) -> web.StreamResponse:
        assert not writer.is_open
        await writer.ping()
        assert writer.is_open
        await writer.send(event(b"{}"))
        return await writer.finish(event(b"[]"))

    server.write = write
    reader, connection = await server.get()
    raw = await reader.readuntil(b"0\r\n\r\n")
    connection.close()

    assert raw.startswith(b"HTTP/1.1 200")
    assert b"Content-Type: text/event-stream; charset=utf-8" in raw
    assert raw.index(PING) < raw.index(b"data: {}\n\n") < raw.index(b"data: []\n\ndata: [DONE]\n\n")


async def test_a_failed_stream_ends_the_connection_without_done(server: Server) -> None:
    async def write(writer: SseWriter) -> web.StreamResponse:
        await writer.send(event(b"{}"))
        raise EngineLost("gone")

    server.write = write
    reader, connection = await server.get()
    raw = await reader.read()
    connection.close()

    assert b"engine_lost" in raw
    assert b"[DONE]" not in raw
    assert raw.endswith(b"0\r\n\r\n")


async def test_a_client_that_does_not_read_is_cut_after_the_deadline(server: Server) -> None:
    server.timeout_seconds = 0.2

    async def write(writer: SseWriter) -> web.StreamResponse:
        while True:
            await writer.send(event(b"x" * 1_000_000))

    server.write = write
    _, connection = await server.get()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await server.has_ended.wait()
    connection.close()

    assert isinstance(server.error, DeadlineExceeded)


async def test_a_client_that_leaves_ends_the_writing(server: Server) -> None:
    async def write(writer: SseWriter) -> web.StreamResponse:
        while True:
            await writer.send(event(b"x" * 10_000))
            await asyncio.sleep(0)

    server.write = write
    reader, connection = await server.get()
    await reader.read(1000)
    connection.transport.abort()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await server.has_ended.wait()

    assert isinstance(server.error, ConnectionError | asyncio.CancelledError)


async def test_events_written_at_once_end_where_the_connection_is_full_and_all_arrive(server: Server) -> None:
    payload, num_written = b"x" * 10_000, 0

    async def write(writer: SseWriter) -> web.StreamResponse:
        nonlocal num_written
        assert not writer.is_clear
        await writer.send(event(b"{}"))
        while writer.is_clear and num_written < 10_000:
            writer.write_now(event(payload))
            num_written += 1
        return await writer.finish(event(b"[]"))

    server.write = write
    reader, connection = await server.get()
    raw = await reader.readuntil(b"\r\n\r\n")
    while not raw.endswith(b"data: [DONE]\n\n"):
        raw += await read_chunk(reader)
    connection.close()

    assert 0 < num_written < 10_000
    assert raw.count(event(payload)) == num_written


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    """Read one chunk of a chunked body, as it was written."""
    size = int(await reader.readline(), 16)
    return (await reader.readexactly(size + 2))[:-2]


@pytest.mark.parametrize("wish", [b"", b"Connection: keep-alive\r\n"])
async def test_a_stream_without_chunks_ends_with_its_connection(server: Server, wish: bytes) -> None:
    """aio-libs/aiohttp keeps it open where the client would like that, which then waits for an end for ever."""

    async def write(writer: SseWriter) -> web.StreamResponse:
        await writer.send(event(b"{}"))
        return await writer.finish(b"")

    server.write = write
    reader, connection = await asyncio.open_connection("127.0.0.1", server.port)
    connection.write(b"GET / HTTP/1.0\r\nHost: x\r\n" + wish + b"\r\n")
    async with asyncio.timeout(PATIENCE_SECONDS):
        raw = await reader.read()
    connection.close()

    assert raw.endswith(b"data: {}\n\ndata: [DONE]\n\n")
    assert b"keep-alive" not in raw


def test_nothing_in_an_event_looks_like_the_end_of_a_line() -> None:
    """florimondmanca/httpx-sse#34 and every client that reads streams with ``str.splitlines``."""
    text = "".join(map(chr, [*range(0xA0), 0x2027, 0x2028, 0x2029, 0x202A, 0xFEFF, 0x1F600]))
    written = event(orjson.dumps({"content": text}))

    lines = written.decode().splitlines()
    assert len(lines) == 2
    assert orjson.loads(lines[0].removeprefix("data: ")) == {"content": text}
    assert orjson.loads(b'"' + json_text(text) + b'"') == text
    assert len(json_text(text).decode().splitlines()) == 1
