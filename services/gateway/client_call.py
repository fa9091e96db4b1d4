"""A client's request on whichever wire it came: what it brings, and where its answer goes.

The seam between those who serve requests and HTTP or gRPC. Owns which ids of clients are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from libs.errors import OctavoError
from services.gateway.identity import Tenant
from services.gateway.limits.report import LimitReport
from services.gateway.request_times import RequestTimes

# What the wire wants at the end, such as an HTTP response; None where everything was written on the way.
Answered = TypeVar("Answered", covariant=True)

# What may stand in a header and in a log line: visible ASCII, of bounded length.
_CLIENT_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
# W3C Trace Context, section 3.2: version ff and ids of zeros are none; a later version may say more behind.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, to which route, and what its headers say."""

    tenant: Tenant
    route: str
    request_id: str
    client_request_id: str | None = None
    traceparent: str | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    limit_report: LimitReport = field(default_factory=LimitReport)


@dataclass(frozen=True, slots=True)
class Framing:
    """What a dialect puts around its events: a sign of life, the end of a good stream, and of a bad one."""

    ping: bytes
    done: bytes
    error_event: Callable[[OctavoError], bytes]


# A body of more takes milliseconds to read, and tens of them to check where it holds hundreds of thousands of token
# ids or ten thousands of messages' parts.
LONG_BODY_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class RequestBody:
    """What is asked, as an object of JSON, and how many bytes said it."""

    fields: dict[str, Any]
    num_bytes: int


class AnswerWriter(Protocol[Answered]):
    """Takes one answer, in parts or as a whole."""

    framing: Framing

    @property
    def is_open(self) -> bool:
        """Whether anything was sent, so that an error can no longer be a plain answer."""

    @property
    def is_clear(self) -> bool:
        """Whether a part of a stream that is open can be written without waiting."""

    def write_now(self, data: bytes) -> None:
        """Write a part of a stream, where that is clear."""

    async def send(self, data: bytes) -> None:
        """Write a part of a stream; raises when the client has left or does not read in time."""

    async def ping(self) -> None:
        """Show that the stream lives."""

    async def finish(self, data: bytes) -> Answered:
        """Write the last part and the end of a good stream; raises as ``send`` does."""

    async def fail(self, error: OctavoError) -> Answered:
        """End a stream that is open with an error."""

    def whole(self, body: bytes) -> Answered:
        """Answer with one body."""


class ClientCall(Protocol[Answered]):
    """One request."""

    @property
    def caller(self) -> Caller:
        """Who asks."""

    @property
    def remaining_seconds(self) -> float | None:
        """The time that the client gives; None for as much as this server gives."""

    async def read_body(self) -> RequestBody:
        """Return what is asked; raises OctavoError."""

    def new_writer(self, deadline: float) -> AnswerWriter[Answered]:
        """Return what takes the answer, until ``deadline`` on the event loop's clock."""


def read_client_request_id(value: str | None) -> str | None:
    """Return the id that a client chose; one that could not be echoed safely counts as none."""
    return value if value is not None and _CLIENT_REQUEST_ID.fullmatch(value) else None


def read_traceparent(value: str | None) -> str | None:
    """Return W3C's trace context in the version that all tiers read, if it is one."""
    match = None if value is None else _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, context, more = match.groups()
    return None if version == "00" and more else f"00-{context}"
