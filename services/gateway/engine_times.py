"""When a request was on its way to an engine and back, on the gateway's clock, and what the engine said of its own.

Owns these marks, for requests that asked for timings. The engine's durations are its own; the two clocks are never
compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.gateway.latency_receipt import Segment, nanos

# Late steps that are kept of one try, the first ones; the others are counted.
MAX_LATE_STEPS: Final = 32


@dataclass(frozen=True, slots=True)
class FirstTokenReport:
    """How an engine says that a first token came about; ``misses`` counts computed prompt tokens by reason."""

    queue_seconds: float
    prefill_seconds: float
    num_cached_tokens: int
    misses: Mapping[str, int]
    # From the sampling of the token, and from handing over the acceptance, until it was handed over itself.
    publish_seconds: float = 0.0
    since_started_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class EngineStall:
    """A gap between two tokens as the engine saw it, and why it was so long."""

    step_id: int
    gap_seconds: float
    reason: str
    step_seconds: float
    num_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class LateStep:
    """A step whose token came later after the one before it than the bound, as the gateway saw it."""

    choice_index: int
    step_id: int
    gap_ns: int
    # Another engine had the token before it.
    is_after_loss: bool = False


@dataclass(slots=True)
class TryTimes:
    """One try of a request on one engine."""

    submitted_ns: int
    stall_bound_ns: int
    accepted_ns: int | None = None
    # From reading the submit until it was accepted, on the engine's clock.
    accept_ns: int | None = None
    first_arrival_ns: int | None = None
    # The choice whose token was the first.
    first_choice: int = 0
    first_tokens: dict[int, FirstTokenReport] = field(default_factory=dict)
    # When the first came of what the reader has not taken yet, and whether it was late.
    unread_since_ns: int | None = None
    is_late: bool = False
    last_step_id: int = 0
    late_steps: list[LateStep] = field(default_factory=list)
    num_late_steps: int = 0
    # What the engine told of its stalls, by choice, of a try that is over.
    told_stalls: Mapping[int, Sequence[EngineStall]] | None = None
    _last_arrivals_ns: dict[int, int] = field(default_factory=dict)
    # Choices of which nothing has come since the engine before this was lost.
    _awaited_choices: set[int] = field(default_factory=set)

    def go_on_from(self, earlier: TryTimes) -> None:
        """Measure the gaps from the last tokens of the engine before, which was lost."""
        self._last_arrivals_ns = dict(earlier._last_arrivals_ns)
        self._awaited_choices = set(earlier._last_arrivals_ns)

    def accept(self, now_ns: int, accept_seconds: float | None) -> None:
        """The engine has taken the request; its word of how long that took came with it."""
        self.accepted_ns = now_ns
        self.accept_ns = None if accept_seconds is None else nanos(accept_seconds)

    def arrive(self, choice_index: int, step_id: int, now_ns: int) -> None:
        """A token of a choice, or its good end, has come."""
        if self.first_arrival_ns is None:
            self.first_arrival_ns, self.first_choice = now_ns, choice_index
        if self.unread_since_ns is None:
            self.unread_since_ns = now_ns
        self.last_step_id = step_id
        gap_ns = now_ns - self._last_arrivals_ns.get(choice_index, now_ns)
        self._last_arrivals_ns[choice_index] = now_ns
        is_after_loss = choice_index in self._awaited_choices
        self._awaited_choices.discard(choice_index)
        if gap_ns > self.stall_bound_ns:
            self.is_late = True
            self.num_late_steps += 1
            if len(self.late_steps) < MAX_LATE_STEPS:
                self.late_steps.append(LateStep(choice_index, step_id, gap_ns, is_after_loss))

    def fail(self, choice_index: int, step_id: int, now_ns: int) -> None:
        """A choice has failed: all that comes of it, unless it had tokens and another engine brings the next."""
        if choice_index not in self._last_arrivals_ns:
            self.arrive(choice_index, step_id, now_ns)

    def take(self) -> None:
        """The reader has taken what had come."""
        self.unread_since_ns, self.is_late = None, False

    def segments(self, until_ns: int) -> dict[Segment, int]:
        """Return where the time until the first token went, or until ``until_ns`` if none has come.

        ``wire`` is the round trip of the submit and its acceptance, less what the engine took in between: what NTP
        calls delay (RFC 5905, section 8). ``delivery`` is how much longer the first token was under way than the
        acceptance: the time between the arrivals of both less the time between their sendings, what RTP calls
        jitter (RFC 3550, section 6.4.1). Where it was the acceptance that came late, the wire is shorter by that.
        """
        first = self.first_tokens.get(self.first_choice)
        if first is None or self.accepted_ns is None or self.accept_ns is None or self.first_arrival_ns is None:
            end_ns = until_ns if self.first_arrival_ns is None else self.first_arrival_ns
            return {Segment.ENGINE: max(0, end_ns - self.submitted_ns)}
        delay_ns, jitter_ns = self.accepted_ns - self.submitted_ns - self.accept_ns, 0
        if first.since_started_seconds is not None:
            jitter_ns = self.first_arrival_ns - self.accepted_ns - nanos(first.since_started_seconds)
        return {
            Segment.WIRE: max(0, delay_ns + min(0, jitter_ns)),
            Segment.ENGINE_QUEUE: nanos(first.queue_seconds),
            Segment.PREFILL: nanos(first.prefill_seconds),
            Segment.PUBLISH: nanos(first.publish_seconds),
            Segment.DELIVERY: max(0, jitter_ns),
        }


@dataclass(slots=True)
class Resumption:
    """An engine that went on after another one was lost with tokens shown; ``times`` as soon as it was asked."""

    lost_ns: int
    times: TryTimes | None = None
    # Whether the reader has what came first.
    is_read: bool = False

    @property
    def first_arrival_ns(self) -> int | None:
        """When the first token came, or an end; None while nothing has."""
        return None if self.times is None else self.times.first_arrival_ns


@dataclass(slots=True)
class Journey:
    """A request's way to its first token: places and tries; and how it went on after losses."""

    # When a place was asked for, and how long until there was one.
    asked_ns: int | None = None
    placement_ns: int = 0
    retry_ns: int = 0
    # The try that brought the first token, or the latest while there is none.
    current: TryTimes | None = None
    resumptions: list[Resumption] = field(default_factory=list)

    @property
    def tries(self) -> list[TryTimes]:
        """The tries that brought tokens, or may do so."""
        tries = [self.current, *(resumption.times for resumption in self.resumptions)]
        return [times for times in tries if times is not None]

    @property
    def latest(self) -> TryTimes | None:
        """The latest of these."""
        tries = self.tries
        return tries[-1] if tries else None

    @property
    def is_resuming(self) -> bool:
        """Whether the reader has had nothing since a loss."""
        return bool(self.resumptions) and not self.resumptions[-1].is_read

    def lose(self, now_ns: int) -> None:
        """The engine was lost with tokens shown; another loss before the next token is the same interruption."""
        if not self.is_resuming:
            self.resumptions.append(Resumption(now_ns))

    def begin_try(self, times: TryTimes | None) -> None:
        """An engine was asked."""
        if self.is_resuming:
            self.resumptions[-1].times = times
        else:
            self.current = times

    def read(self) -> None:
        """The reader has taken what had come."""
        if self.is_resuming and self.resumptions[-1].first_arrival_ns is not None:
            self.resumptions[-1].is_read = True

    def segments(self, until_ns: int) -> dict[Segment, int]:
        """Return where the time went from asking for a place until the first token."""
        segments = {Segment.ROUTER_QUEUE: self.placement_ns, Segment.RETRIES: self.retry_ns}
        return segments if self.current is None else segments | self.current.segments(until_ns)
