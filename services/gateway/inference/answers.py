"""Answers over gRPC: the chunks of an endpoint's stream as messages, and the writer that sends them.

Owns how chunks become messages and how these are sent. The bytes of several messages of protobuf behind each other
are the message that they merge to, so the chunks of a step are sent as one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import grpc.aio
import orjson

from libs.errors import DeadlineExceeded, OctavoError
from services.gateway.answer_format import AnswerFormat, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.client_call import Framing
from services.gateway.sse import error_event, payloads_of

# gRPC has its own signs of life, its own end and its own errors.
_FRAMING: Final = Framing(ping=b"", done=b"", error_event=error_event)


class Message(Protocol):
    """A message of protobuf."""

    def SerializeToString(self) -> bytes:
        """Return its bytes."""


class MessageFormat:
    """One answer as messages, made from the chunks that it would be over HTTP."""

    framing = _FRAMING

    def __init__(self, chunks: AnswerFormat, message_of: Callable[[Mapping[str, Any]], Message]) -> None:
        self._chunks = chunks
        self._message_of = message_of

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self._chunks.includes_usage

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return a message for a delta; none for no event."""
        return self._merged(self._chunks.events(delta))

    def text_template(self, choice_index: int) -> None:
        """Return nothing: messages are not cut from bytes."""

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return a message with the counts."""
        return self._merged(self._chunks.usage_event(counts))

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Fail: every answer over gRPC is a stream."""
        raise AssertionError("an answer over gRPC is a stream")

    def _merged(self, events: bytes) -> bytes:
        messages = (self._message_of(orjson.loads(payload)) for payload in payloads_of(events))
        return b"".join(message.SerializeToString() for message in messages)


class MessageWriter:
    """Writes one answer to a call, whose client may read slowly but not beyond the deadline."""

    def __init__(self, context: Any, message_type: Any, *, deadline: float) -> None:
        """Begin; the types of generated messages and of grpc.aio's context cannot be named more closely."""
        self._context: grpc.aio.ServicerContext[Any, Any] = context
        self._message_type = message_type
        self._deadline = deadline
        self.framing = _FRAMING
        self.is_open = False
        # gRPC says only by waiting whether a message can be written.
        self.is_clear = False

    def write_now(self, data: bytes) -> None:
        """Fail: a call is never clear."""
        raise AssertionError("a message over gRPC waits")

    async def send(self, data: bytes) -> None:
        """Write a message of these bytes; raises DeadlineExceeded when the client did not read in time."""
        if not data:
            return
        self.is_open = True
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._context.write(self._message_type.FromString(data))
        except TimeoutError:
            raise DeadlineExceeded("The client did not read the answer in the time that it has.") from None

    async def ping(self) -> None:
        """Do nothing: the connection has its own signs of life."""

    async def finish(self, data: bytes) -> None:
        """Write the last message."""
        await self.send(data)

    async def fail(self, error: OctavoError) -> None:
        """Raise the error: a call ends with its status, whether or not there were messages before."""
        raise error

    def whole(self, body: bytes) -> None:
        """Fail: every answer over gRPC is a stream."""
        raise AssertionError("an answer over gRPC is a stream")
