"""The latency receipt: where the time of one request went, as a waterfall that adds up to what was measured.

Owns the segments, their sum and the receipt's shape. Pure: durations are measured by others, on one clock, and each
is a measurement of its own. What none of them covers is ``unattributed``; nothing else is a remainder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

_NANOS_PER_MICRO: Final = 1_000
_NANOS_PER_SECOND: Final = 1_000_000_000


class Segment(StrEnum):
    """What a request's time is spent on, in the order in which a request meets it."""

    # The client sends head and body.
    RECEIVE = "receive"
    AUTH = "auth"
    PARSE = "parse"
    GUARDRAIL = "guardrail"
    # The request is written down before it is served.
    RECORD = "record"
    # Waiting for a thread that prepares text.
    TEXT_QUEUE = "text_queue"
    # A grammar is compiled to see whether it can be enforced.
    CONSTRAINT = "constraint"
    TEMPLATE = "template"
    TOKENIZE = "tokenize"
    HASH = "hash"
    # The tenant's limits are asked for room.
    LIMITS = "limits"
    # From asking for a place until one is given, the way to the router and back included.
    ROUTER_QUEUE = "router_queue"
    # Tries on engines that failed, and finding another place.
    RETRIES = "retries"
    # One round trip between gateway and engine.
    WIRE = "wire"
    ENGINE_QUEUE = "engine_queue"
    PREFILL = "prefill"
    # In the engine, from the sampling of the first token until it was handed to the stream.
    PUBLISH = "publish"
    # How much longer the first token was under way than the acceptance.
    DELIVERY = "delivery"
    # An engine that could not tell more had the request.
    ENGINE = "engine"
    # From a first token's arrival until its bytes were ready for the client's socket.
    FIRST_TOKEN = "first_token"
    # Waiting for tokens after the first, but for stalls.
    DECODE = "decode"
    STALLS = "stalls"
    # From the loss of an engine after the first token until another one has brought the next.
    RESUME = "resume"
    DETOKENIZE = "detokenize"
    # Giving text the shape of the endpoint.
    FORMAT = "format"
    # The event loop was late to go on with what had come.
    EVENT_LOOP = "event_loop"
    # Handing bytes to the client's socket, which waits for a client that reads slowly.
    WRITE_BLOCKED = "write_blocked"
    # Waiting for the engine's counts after the text was over.
    SETTLE = "settle"


class GatewayStallReason(StrEnum):
    """Why a client's token came late without the engine's doing."""

    # The engine knows of no such gap, so it was made on the way.
    WIRE = "wire"
    SLOW_READER = "slow_reader"
    EVENT_LOOP = "event_loop"
    # The engine was lost, and another one went on.
    RESUME = "resume"
    # The engine was lost before it could tell.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ReceiptStall:
    """A gap between two tokens of a choice beyond the bound; ``step_id`` is that of the step that ended it.

    ``step_ns`` and ``num_prefill_tokens`` describe that step, where the engine told.
    """

    choice_index: int
    step_id: int
    gap_ns: int
    reason: str
    step_ns: int | None = None
    num_prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChoiceReceipt:
    """What an engine said of one choice; None is what it could not tell."""

    choice_index: int
    engine_id: str
    queue_ns: int | None = None
    prefill_ns: int | None = None
    decode_ns: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    misses: Mapping[str, int] | None = None
    num_output_tokens: int | None = None
    num_preemptions: int | None = None


@dataclass(frozen=True, slots=True)
class StallReport:
    """The stalls of a request: those that were kept and how many there were."""

    bound_ns: int
    num_stalls: int = 0
    stalls: tuple[ReceiptStall, ...] = ()


@dataclass(frozen=True, slots=True)
class LatencyReceipt:
    """A waterfall. The segments and ``unattributed_ns`` add up to ``wall_ns``.

    ``unattributed_ns`` can be a hair below zero where the clocks of gateway and engine run at different rates.
    ``absent`` says of segments why they are zero.
    """

    wall_ns: int
    segments_ns: Mapping[Segment, int]
    absent: Mapping[Segment, str]
    num_retries: int = 0
    choices: Sequence[ChoiceReceipt] = ()
    stalls: StallReport | None = None

    @property
    def unattributed_ns(self) -> int:
        """What no segment covers."""
        return self.wall_ns - sum(self.segments_ns.values())

    def as_json(self) -> dict[str, Any]:
        """Return the ``timings`` of an answer; integers, so that they add up exactly."""
        segments = {segment.value: _micros(self.segments_ns.get(segment, 0)) for segment in Segment}
        wall = _micros(self.wall_ns)
        return {
            "wall_us": wall,
            "segments_us": segments,
            "unattributed_us": wall - sum(segments.values()),
            "absent": {segment.value: reason for segment, reason in self.absent.items()},
            "retries": self.num_retries,
            "choices": [_choice_json(choice) for choice in self.choices],
            "stalls": None if self.stalls is None else _stalls_json(self.stalls),
        }


class Marks(Protocol):
    """Takes the end of what was just done."""

    def lap(self, segment: Segment) -> None:
        """The time since the last mark was this segment."""


class NoMarks:
    """Takes marks of work that no request waits for."""

    def lap(self, segment: Segment) -> None:
        """Do nothing."""


class Waterfall:
    """Adds up the segments of a request from its first byte on; times are nanoseconds of one clock."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        # Until here the time is accounted for.
        self.cursor_ns = start_ns
        self._segments: dict[Segment, int] = {}
        # From the first lap of each segment to the end of its last.
        self._intervals: dict[Segment, tuple[int, int]] = {}

    def lap(self, segment: Segment, now_ns: int) -> int:
        """Give a segment the time since the last mark; returns it."""
        duration_ns = max(0, now_ns - self.cursor_ns)
        self.add(segment, duration_ns)
        start_ns, _ = self._intervals.get(segment, (self.cursor_ns, 0))
        self.cursor_ns = max(self.cursor_ns, now_ns)
        self._intervals[segment] = (start_ns, self.cursor_ns)
        return duration_ns

    def skip(self, now_ns: int) -> None:
        """Give nobody the time since the last mark."""
        self.cursor_ns = max(self.cursor_ns, now_ns)

    def add(self, segment: Segment, duration_ns: int) -> None:
        """Give a segment time that was measured elsewhere."""
        self._segments[segment] = self._segments.get(segment, 0) + duration_ns

    def interval(self, segment: Segment) -> tuple[int, int] | None:
        """Return when a segment began first and ended last; None where it never was."""
        return self._intervals.get(segment)

    def segments(self, others: Iterable[Mapping[Segment, int]] = ()) -> dict[Segment, int]:
        """Return the sums so far, with those that were measured elsewhere and are not added yet."""
        sums = dict(self._segments)
        for other in others:
            for segment, duration_ns in other.items():
                sums[segment] = sums.get(segment, 0) + duration_ns
        return sums


def server_timing(segments_ns: Mapping[Segment, int]) -> str:
    """Return the value of a Server-Timing header: names with durations in milliseconds (W3C Server Timing)."""
    known = [(segment, segments_ns[segment]) for segment in Segment if segments_ns.get(segment)]
    return ", ".join(f"{segment.value};dur={_micros(duration_ns) / 1_000:.3f}" for segment, duration_ns in known)


def nanos(seconds: float) -> int:
    """Return a duration in nanoseconds."""
    return round(seconds * _NANOS_PER_SECOND)


def _micros(duration_ns: int) -> int:
    return duration_ns // _NANOS_PER_MICRO


def _optional_micros(duration_ns: int | None) -> int | None:
    return None if duration_ns is None else _micros(duration_ns)


def _choice_json(choice: ChoiceReceipt) -> dict[str, Any]:
    cached = choice.num_cached_tokens
    return {
        "index": choice.choice_index,
        "engine_id": choice.engine_id,
        "queue_us": _optional_micros(choice.queue_ns),
        "prefill_us": _optional_micros(choice.prefill_ns),
        "decode_us": _optional_micros(choice.decode_ns),
        "prompt_tokens": choice.num_prompt_tokens,
        "cached_tokens": cached,
        "computed_tokens": None if cached is None else choice.num_prompt_tokens - cached,
        "computed_because": None if choice.misses is None else dict(choice.misses),
        "output_tokens": choice.num_output_tokens,
        "preemptions": choice.num_preemptions,
    }


def _stalls_json(report: StallReport) -> dict[str, Any]:
    return {
        "bound_us": _micros(report.bound_ns),
        "count": report.num_stalls,
        "first": [
            {
                "choice": stall.choice_index,
                "step_id": stall.step_id,
                "gap_us": _micros(stall.gap_ns),
                "reason": stall.reason,
                "step_us": _optional_micros(stall.step_ns),
                "prefill_tokens": stall.num_prefill_tokens,
            }
            for stall in report.stalls
        ],
    }
