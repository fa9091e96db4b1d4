"""Spans: what one process did for a request, joined across processes by the W3C trace context.

Owns the seam; who keeps spans is ``tracers.py``'s choice. Times are nanoseconds of ``time.monotonic_ns``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

AttributeValue: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, AttributeValue]

_NO_ATTRIBUTES: Final[Attributes] = {}


class SpanKind(StrEnum):
    """How a span stands to others (OpenTelemetry's span kinds)."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened at one moment of a span."""

    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict)


class Span(Protocol):
    """A span that has begun."""

    @property
    def is_recording(self) -> bool:
        """Whether anybody will see it."""

    @property
    def traceparent(self) -> str | None:
        """The context for those who work for it; None where there is none."""

    def end(
        self,
        end_ns: int,
        attributes: Attributes = _NO_ATTRIBUTES,
        *,
        events: Sequence[SpanEvent] = (),
        error: str | None = None,
    ) -> None:
        """End it; ``error`` says what went wrong, if anything did."""


class Tracer(Protocol):
    """Begins spans."""

    def start(
        self,
        name: str,
        *,
        traceparent: str | None,
        start_ns: int,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = _NO_ATTRIBUTES,
    ) -> Span:
        """Begin a span below ``traceparent``, or one that has no parent."""

    def close(self) -> None:
        """Send what is left, for a bounded time; blocks."""


@dataclass(frozen=True, slots=True)
class _PassedSpan:
    """A span that nobody keeps: what works for it belongs to its parent."""

    traceparent: str | None
    is_recording: bool = False

    def end(
        self,
        end_ns: int,
        attributes: Attributes = _NO_ATTRIBUTES,
        *,
        events: Sequence[SpanEvent] = (),
        error: str | None = None,
    ) -> None:
        """Do nothing."""


class NoTracer:
    """Keeps nothing and passes contexts on."""

    def start(
        self,
        name: str,
        *,
        traceparent: str | None,
        start_ns: int,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = _NO_ATTRIBUTES,
    ) -> Span:
        """Return a stand-in."""
        return _PassedSpan(traceparent)

    def close(self) -> None:
        """Do nothing."""


NO_TRACER: Final[Tracer] = NoTracer()
