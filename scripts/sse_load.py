"""Many server-sent event streams over raw sockets in one thread, with little work for each event.

Counts bytes, events and tokens without parsing JSON, so that the client does not take the core that is measured: an
event of a chat completion has one ``[``, and each of the stub engine's tokens has one space.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_RECEIVE_BYTES = 262_144
_END = b"\r\n0\r\n\r\n"
_OK = 200
_NOTHING = memoryview(b"")


@dataclass(slots=True)
class Counts:
    """What came in a span of time; gaps are seconds between two receipts of one stream."""

    num_bytes: int = 0
    num_events: int = 0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Stream:
    """One connection and its request under way."""

    connection: socket.socket
    sent_at: float = 0.0
    first_at: float | None = None
    last_at: float = 0.0
    ended_at: float | None = None
    head: bytes = b""
    tail: bytes = b""
    outgoing: memoryview = _NOTHING

    @property
    def status(self) -> int:
        """The answer's HTTP status; 0 before there is one."""
        return int(self.head[9:12]) if len(self.head) >= 12 else 0


def request_bytes(body: bytes, *, path: str = "/v1/chat/completions") -> bytes:
    """Return a whole HTTP request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Load:
    """Streams to one address; made by ``open_load``."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._selector = selectors.DefaultSelector()
        self._idle: list[Stream] = []
        self.active: set[Stream] = set()
        self.counts = Counts()
        self.on_end: Callable[[Stream], None] = lambda stream: None

    def begin(self, request: bytes, *, elsewhere: tuple[str, int] | None = None) -> Stream:
        """Send a request over an idle connection, or a new one; to another address where one is given."""
        if elsewhere is not None:
            stream = self._connect(elsewhere)
        else:
            stream = self._idle.pop() if self._idle else self._connect(self._address)
        stream.first_at = stream.ended_at = None
        stream.head = stream.tail = b""
        stream.sent_at = stream.last_at = time.perf_counter()
        stream.outgoing = memoryview(request)
        self._send(stream)
        self.active.add(stream)
        return stream

    def run_until(self, deadline: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Read what comes until a moment on ``time.perf_counter`` or until ``is_done``."""
        while not is_done() and (left := deadline - time.perf_counter()) > 0:
            for key, mask in self._selector.select(left):
                stream = key.data
                if mask & selectors.EVENT_WRITE:
                    self._send(stream)
                if mask & selectors.EVENT_READ:
                    self._receive(stream)

    def take_counts(self) -> Counts:
        """Return the counts since the last time and begin anew."""
        counts, self.counts = self.counts, Counts()
        return counts

    def close(self) -> None:
        """Break all connections."""
        for key in list((self._selector.get_map() or {}).values()):
            key.data.connection.close()
        self._selector.close()

    def _connect(self, address: tuple[str, int]) -> Stream:
        connection = socket.create_connection(address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        stream = Stream(connection)
        self._selector.register(connection, selectors.EVENT_READ, stream)
        return stream

    def _send(self, stream: Stream) -> None:
        try:
            stream.outgoing = stream.outgoing[stream.connection.send(stream.outgoing) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            stream.outgoing = _NOTHING
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.outgoing else 0)
        if self._selector.get_key(stream.connection).events != events:
            self._selector.modify(stream.connection, events, stream)

    def _receive(self, stream: Stream) -> None:
        try:
            data = stream.connection.recv(_RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        now = time.perf_counter()
        if not data:
            self._lose(stream, now)
            return
        if stream.first_at is None:
            stream.first_at = now
        else:
            self.counts.gaps.append(now - stream.last_at)
        if stream.status != _OK:
            stream.head += data
        if stream.status != _OK:
            # An answer that is an error, or the beginning of a head; its connection is not used again.
            if _is_whole(stream.head):
                self._lose(stream, now)
            return
        stream.last_at = now
        num_events = data.count(b"[")
        self.counts.num_bytes += len(data)
        self.counts.num_events += num_events
        self.counts.num_tokens += data.count(b" ") - num_events
        stream.tail = (stream.tail + data)[-len(_END) :] if len(data) < len(_END) else data[-len(_END) :]
        if stream.tail == _END:
            self._end(stream, now)
            self._idle.append(stream)

    def _lose(self, stream: Stream, now: float) -> None:
        self._selector.unregister(stream.connection)
        stream.connection.close()
        if stream in self.active:
            self._end(stream, now)
        elif stream in self._idle:
            self._idle.remove(stream)

    def _end(self, stream: Stream, now: float) -> None:
        stream.ended_at = now
        self.active.discard(stream)
        self.on_end(stream)


def _is_whole(answer: bytes) -> bool:
    """Whether an error's answer has its whole body."""
    head, found, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    return bool(found) and length.isdigit() and len(body) >= int(length)


@contextmanager
def open_load(host: str, port: int) -> Iterator[Load]:
    """Open a load; its connections are closed at the end."""
    load = Load(host, port)
    try:
        yield load
    finally:
        load.close()
