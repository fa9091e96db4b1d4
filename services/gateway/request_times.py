"""The marks of one request while it is served: who sets them, and the receipt that they become.

Owns the clock of the receipt. Every part of the gateway that a request passes marks the end of what it did; only
what follows each token is marked for those alone who asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from services.gateway.engine_times import EngineStall, Journey, LateStep, TryTimes
from services.gateway.failover import Generation
from services.gateway.generation import EngineUsage
from services.gateway.generation_options import GenerationOptions
from services.gateway.latency_receipt import (
    ChoiceReceipt,
    GatewayStallReason,
    LatencyReceipt,
    ReceiptStall,
    Segment,
    StallReport,
    Waterfall,
    nanos,
    server_timing,
)

# Stalls that a receipt shows, of all choices and of the gateway itself.
MAX_SHOWN_STALLS: Final = 32
_ABSENT: Final[Mapping[Segment, str]] = {Segment.GUARDRAIL: "no guardrail is configured"}
_UNLIMITED: Final = "the tenant has no limits"
_WHOLE: Final = "the answer is not streamed"


class RequestTimes:
    """The marks of one request, from its first byte on."""

    def __init__(self, start_ns: int | None = None) -> None:
        """Begin at ``start_ns`` of ``time.monotonic_ns``, or now."""
        self._waterfall = Waterfall(time.monotonic_ns() if start_ns is None else start_ns)
        # Whether the client wants the receipt.
        self.is_wanted = False
        # Whether the client was told.
        self.is_told = False
        # Whether its spans are kept, which are made from the same marks.
        self.is_traced = False
        self.is_streamed = False
        self.stall_bound_seconds = 0.0
        self._generations: Sequence[Generation] = ()
        self._stalls: list[ReceiptStall] = []
        self._num_stalls = 0

    def want(self, options: GenerationOptions, stall_bound_seconds: float) -> None:
        """Take what the body says; gaps between tokens beyond the bound will count as stalls."""
        self.is_wanted = self.is_wanted or options.returns_timings
        self.is_streamed = options.is_streaming
        self.stall_bound_seconds = stall_bound_seconds

    @property
    def start_ns(self) -> int:
        """When the request's first byte came."""
        return self._waterfall.start_ns

    @property
    def wanted_stall_bound_seconds(self) -> float | None:
        """What engines are asked to tell: gaps beyond this; None where nothing is wanted."""
        return self.stall_bound_seconds if self.is_marked else None

    @property
    def is_marked(self) -> bool:
        """Whether the marks of each step are of interest."""
        return self.is_wanted or self.is_traced

    @property
    def journeys(self) -> list[Journey]:
        """The ways of the request's prompts, as far as they have begun."""
        return [generation.journey for generation in self._generations]

    def intervals(self, segments: Sequence[Segment]) -> dict[Segment, tuple[int, int]]:
        """Return when each of these began and ended, of those that were."""
        found = ((segment, self._waterfall.interval(segment)) for segment in segments)
        return {segment: interval for segment, interval in found if interval is not None}

    def lap(self, segment: Segment) -> None:
        """The time since the last mark was this segment."""
        self._waterfall.lap(segment, time.monotonic_ns())

    def skip(self) -> None:
        """The time since the last mark was nothing that has a name."""
        self._waterfall.skip(time.monotonic_ns())

    def answer_times(self, generations: Sequence[Generation]) -> AnswerTimes:
        """Begin to wait for these generations; returns what takes the marks of the answer."""
        self.skip()
        self._generations = generations
        if not self.is_marked:
            return NO_ANSWER_TIMES
        return _Watch(self._waterfall, generations, self)

    def note_stall(self, reason: GatewayStallReason, gap_ns: int) -> None:
        """Note a gap that the gateway made itself or that its client did."""
        self._num_stalls += 1
        if len(self._stalls) < MAX_SHOWN_STALLS:
            step_id = max((times.last_step_id for times in self._tries()), default=0)
            self._stalls.append(ReceiptStall(0, step_id, gap_ns, reason.value))

    def server_timing(self) -> str:
        """Return the Server-Timing of what is known now."""
        return server_timing(self._segments(time.monotonic_ns()))

    def receipt(self) -> LatencyReceipt:
        """Return the receipt of the time until now."""
        now_ns = time.monotonic_ns()
        segments_ns = self._segments(now_ns)
        absent = dict(_ABSENT)
        if Segment.LIMITS not in segments_ns:
            absent[Segment.LIMITS] = _UNLIMITED
        if not self.is_streamed:
            absent[Segment.FIRST_TOKEN] = absent[Segment.WRITE_BLOCKED] = _WHOLE
        return LatencyReceipt(
            wall_ns=now_ns - self.start_ns,
            segments_ns=segments_ns,
            absent=absent,
            num_retries=sum(generation.num_retries for generation in self._generations),
            choices=self._choices(),
            stalls=self._stall_report() if self.is_marked else None,
        )

    def _segments(self, now_ns: int) -> dict[Segment, int]:
        journey = critical_journey(self._generations)
        return self._waterfall.segments([] if journey is None else [journey.segments(now_ns)])

    def _tries(self) -> list[TryTimes]:
        return [times for generation in self._generations for times in generation.journey.tries]

    def _choices(self) -> list[ChoiceReceipt]:
        choices: list[ChoiceReceipt] = []
        for generation in self._generations:
            times = generation.journey.current
            for index, usage in enumerate(generation.usages):
                choices.append(_choice_receipt(len(choices), generation, index, times, usage))
        return choices

    def _stall_report(self) -> StallReport:
        stalls, num_stalls, first_index = list(self._stalls), self._num_stalls, 0
        for generation in self._generations:
            for times in generation.journey.tries:
                told = generation.told_stalls if times.told_stalls is None else times.told_stalls
                stalls += _engine_stalls(times, told, first_index)
                num_stalls += times.num_late_steps
            first_index += generation.num_choices
        stalls.sort(key=lambda stall: stall.step_id)
        return StallReport(nanos(self.stall_bound_seconds), num_stalls, tuple(stalls[:MAX_SHOWN_STALLS]))


class AnswerTimes(Protocol):
    """Takes the marks of an answer, which come with every step."""

    def woke(self) -> None:
        """The reader goes on, because something may have come."""

    def waited(self) -> None:
        """The reader goes on, although nothing came."""

    def lap(self, segment: Segment) -> None:
        """The time since the last mark was this segment."""

    def took(self) -> None:
        """What had come was taken and is text."""

    def wrote(self) -> None:
        """Bytes were handed to the client's socket."""


class _NoAnswerTimes:
    """Nobody asked."""

    def woke(self) -> None:
        """Do nothing."""

    def waited(self) -> None:
        """Do nothing."""

    def lap(self, segment: Segment) -> None:
        """Do nothing."""

    def took(self) -> None:
        """Do nothing."""

    def wrote(self) -> None:
        """Do nothing."""


NO_ANSWER_TIMES: Final = _NoAnswerTimes()


class _Watch:
    """Divides the time of an answer between waiting for engines and the gateway's own work.

    Until the first token, waiting is not a segment: its parts are measured by themselves (``Journey``).
    """

    def __init__(self, waterfall: Waterfall, generations: Sequence[Generation], times: RequestTimes) -> None:
        self._waterfall = waterfall
        self._generations = generations
        self._times = times
        self._stall_bound_ns = nanos(times.stall_bound_seconds)
        self._has_begun = False
        self._has_written = not times.is_streamed

    def woke(self) -> None:
        now_ns = time.monotonic_ns()
        journeys = [generation.journey for generation in self._generations]
        tries = [times for journey in journeys if (times := journey.latest) is not None]
        unread = [times.unread_since_ns for times in tries if times.unread_since_ns is not None]
        self._wait(min(unread, default=now_ns), is_late=any(times.is_late for times in tries))
        for journey in journeys:
            journey.read()
        late_ns = now_ns - self._waterfall.cursor_ns
        self._waterfall.lap(self._named(Segment.EVENT_LOOP), now_ns)
        if late_ns > self._stall_bound_ns:
            self._times.note_stall(GatewayStallReason.EVENT_LOOP, late_ns)

    def waited(self) -> None:
        self._wait(time.monotonic_ns(), is_late=False)

    def lap(self, segment: Segment) -> None:
        self._waterfall.lap(self._named(segment), time.monotonic_ns())

    def took(self) -> None:
        self.lap(Segment.DETOKENIZE)
        self._has_begun = True

    def wrote(self) -> None:
        written_ns = self._waterfall.lap(Segment.WRITE_BLOCKED, time.monotonic_ns())
        if written_ns > self._stall_bound_ns:
            self._times.note_stall(GatewayStallReason.SLOW_READER, written_ns)
        self._has_written = self._has_written or self._has_begun

    def _wait(self, until_ns: int, *, is_late: bool) -> None:
        if not self._has_begun:
            self._waterfall.skip(until_ns)
        else:
            is_resuming = any(generation.journey.is_resuming for generation in self._generations)
            late = Segment.RESUME if is_resuming else Segment.STALLS
            self._waterfall.lap(late if is_late or is_resuming else Segment.DECODE, until_ns)

    def _named(self, segment: Segment) -> Segment:
        """Return the segment, or that of the first token's way until its bytes were written."""
        return segment if self._has_written else Segment.FIRST_TOKEN


def critical_journey(generations: Sequence[Generation]) -> Journey | None:
    """Return the way of the prompt whose first token came first: it is what the reader waited for.

    While none has come, of any prompt that was submitted.
    """
    journeys = [generation.journey for generation in generations]
    return min(journeys, key=_first_arrival_ns, default=None)


def _first_arrival_ns(journey: Journey) -> float:
    arrival_ns = None if journey.current is None else journey.current.first_arrival_ns
    return math.inf if arrival_ns is None else arrival_ns


def _choice_receipt(
    choice_index: int, generation: Generation, index: int, times: TryTimes | None, usage: EngineUsage | None
) -> ChoiceReceipt:
    first = None if times is None else times.first_tokens.get(index)
    return ChoiceReceipt(
        choice_index=choice_index,
        engine_id=generation.engine_id,
        queue_ns=None if first is None else nanos(first.queue_seconds),
        prefill_ns=None if first is None else nanos(first.prefill_seconds),
        decode_ns=None if usage is None else nanos(usage.decode_seconds),
        num_prompt_tokens=generation.num_prompt_tokens,
        num_cached_tokens=None if first is None else first.num_cached_tokens,
        misses=None if first is None else first.misses,
        num_output_tokens=None if usage is None else usage.num_output_tokens,
        num_preemptions=None if usage is None else usage.num_preemptions,
    )


def _engine_stalls(
    times: TryTimes, told: Mapping[int, Sequence[EngineStall]], first_index: int
) -> list[ReceiptStall]:
    """Return the late steps of a try, each with the reason that the engine gives for it, if it ``told`` any."""
    stalls: list[ReceiptStall] = []
    for late in times.late_steps:
        index = first_index + late.choice_index
        by_step = {stall.step_id: stall for stall in told.get(late.choice_index, ())}
        stall = None if late.is_after_loss else by_step.get(late.step_id)
        if stall is not None:
            step_ns, num_prefill_tokens = nanos(stall.step_seconds), stall.num_prefill_tokens
            stalls.append(ReceiptStall(index, late.step_id, late.gap_ns, stall.reason, step_ns, num_prefill_tokens))
        else:
            reason = _untold_reason(late, is_known=late.choice_index in told)
            stalls.append(ReceiptStall(index, late.step_id, late.gap_ns, reason.value))
    return stalls


def _untold_reason(late: LateStep, *, is_known: bool) -> GatewayStallReason:
    """Return the reason of a late step of which the engine told nothing; ``is_known`` where it could have."""
    if late.is_after_loss:
        return GatewayStallReason.RESUME
    return GatewayStallReason.WIRE if is_known else GatewayStallReason.UNKNOWN
