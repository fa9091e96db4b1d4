"""Server-sent events: the bytes of a stream and the writer that sends them.

Owns framing, keep-alive signs and the end of a stream: OpenAI's is ``[DONE]`` after a good one, an error event and
no ``[DONE]`` after a bad one. It must not know what events say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import HttpVersion11, web

from libs.errors import DeadlineExceeded, OctavoError
from services.gateway.client_call import Framing
from services.gateway.http_errors import error_body, known_error

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"

# U+0085, U+2028 and U+2029 in UTF-8. In JSON they stand nowhere but in strings, so they can be escaped blindly.
_LINE_ENDS: Final = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))

# Time for an error event to reach a client whose connection is full.
_LAST_WORDS_SECONDS: Final = 1.0

HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies such as nginx must not hold events back.
    "X-Accel-Buffering": "no",
}


def event(payload: bytes) -> bytes:
    """Return an event with one line of JSON."""
    return b"data: " + one_line(payload) + b"\n\n"


def one_line(json: bytes) -> bytes:
    """Escape what JSON may hold as it is and some clients take for the end of a line.

    Lines of a stream end with CR or LF, which JSON escapes. Clients that cut text as Python's ``splitlines`` does
    also cut it at these three characters, in the middle of an event.
    """
    if json.isascii():
        return json
    for line_end, escape in _LINE_ENDS:
        json = json.replace(line_end, escape)
    return json


def payloads_of(events: bytes) -> list[bytes]:
    """Return what ``event`` was given for each of these events."""
    return [line.removeprefix(b"data: ") for line in events.split(b"\n\n")[:-1]]


def error_event(error: OctavoError) -> bytes:
    """Return the event that ends a stream that went wrong."""
    return event(error_body(known_error(error)))


def named_event(name: str, payload: bytes) -> bytes:
    """Return an event that has its name in a line of its own."""
    return b"event: " + name.encode() + b"\n" + event(payload)


OPENAI_FRAMING: Final = Framing(PING, DONE, error_event)


class _EventStream(web.StreamResponse):
    """A response whose head goes with its first events, in one write."""

    _send_headers_immediately = False


class SseWriter:
    """Writes one stream. The head is sent with the first bytes, so that errors before them are plain answers.

    A client that reads slowly makes ``send`` wait, until ``deadline`` on the event loop's clock; what comes
    meanwhile is merged by the caller's source.
    """

    def __init__(self, request: web.Request, *, deadline: float) -> None:
        self._request = request
        self._deadline = deadline
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.Transport | None = None
        self._is_chunked = request.version >= HttpVersion11
        self.framing = OPENAI_FRAMING

    @property
    def is_open(self) -> bool:
        """Whether the head was sent."""
        return self._response is not None

    @property
    def is_clear(self) -> bool:
        """Whether the stream is open and its connection takes bytes without waiting."""
        transport = self._transport
        return transport is not None and not (self._request.protocol.writing_paused or transport.is_closing())

    def write_now(self, data: bytes) -> None:
        """Write whole events as aiohttp would, but for its many steps on the way; only where that is clear."""
        assert self._transport is not None, "a stream that is clear has a connection"
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def send(self, data: bytes) -> None:
        """Write whole events.

        Raises:
            ConnectionResetError: the client has left.
            DeadlineExceeded: the client did not read in time.
        """
        if data and self.is_clear:
            self.write_now(data)
            return
        async with self._in_time():
            await (await self._opened()).write(data)

    async def ping(self) -> None:
        """Write what every client ignores, so that nobody takes silence for death."""
        await self.send(self.framing.ping)

    async def finish(self, data: bytes) -> web.StreamResponse:
        """Write the last events and the end; raises as ``send`` does."""
        async with self._in_time():
            response = await self._opened()
            # One write wakes the client once.
            await response.write_eof(data + self.framing.done)
            return response

    async def fail(self, error: OctavoError) -> web.StreamResponse:
        """Write an error event and end the connection; one whose client does not read is cut."""
        response = await self._opened()
        response.force_close()
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await response.write_eof(self.framing.error_event(error))
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("The client does not read.") from None
        return response

    def whole(self, body: bytes) -> web.StreamResponse:
        """Return an answer that is no stream."""
        return web.Response(body=body, content_type="application/json")

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError:
            raise DeadlineExceeded("The client did not read the answer in the time that it has.") from None

    async def _opened(self) -> web.StreamResponse:
        if self._response is None:
            response = _EventStream(headers=HEADERS)
            if not self._is_chunked:
                # Only the end of the connection can tell the end of the stream, whatever the client would like.
                response.force_close()
            await response.prepare(self._request)
            self._response = response
            self._transport = self._request.transport
        return self._response
