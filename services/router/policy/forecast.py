"""Forecasts: how long a request would wait at an engine, and when to come back when there is no room. Pure.

Everything is in seconds, so that queueing, computing and a cached prefix can be weighed against each other.
What is unknown is taken to be like the rest, never to be zero: an engine that has not reported yet is not idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.router.policy.facts import EngineFacts, Forecast, PlacementRequest

# Output tokens that a request is taken to have, or to have left, while nobody knows how many there will be.
NEUTRAL_OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class UnmeasuredRates:
    """Rates to assume while no engine of a model has measured its own."""

    prefill_tokens_per_second: float
    decode_step_seconds: float


@dataclass(frozen=True, slots=True)
class NeutralLoad:
    """What an engine is taken to be like while its own figures are unknown: the mean of its peers'."""

    prefill_tokens_per_second: float
    decode_step_seconds: float
    num_pending_prefill_tokens: float
    num_running_requests: float

    @classmethod
    def of(cls, engines: Sequence[EngineFacts], unmeasured: UnmeasuredRates) -> NeutralLoad:
        """Average what is known of ``engines``."""
        loads = [engine.load for engine in engines if engine.load is not None]
        return cls(
            prefill_tokens_per_second=_mean(
                (load.prefill_tokens_per_second for load in loads), unmeasured.prefill_tokens_per_second
            ),
            decode_step_seconds=_mean((load.decode_step_seconds for load in loads), unmeasured.decode_step_seconds),
            num_pending_prefill_tokens=_mean((load.num_pending_prefill_tokens for load in loads), 0.0),
            num_running_requests=_mean((load.num_running_requests for load in loads), 0.0),
        )


def forecast(
    engine: EngineFacts, request: PlacementRequest, num_cached_tokens: int, neutral: NeutralLoad
) -> Forecast:
    """Predict the time to the request's first token, once it is submitted to ``engine``.

    It is the time to prefill what waits there and what the request adds, the decoding that shares those steps,
    and, when all seats are taken, the time until one is free.
    """
    load = engine.load
    pending = load.num_pending_prefill_tokens if load else neutral.num_pending_prefill_tokens
    num_tokens = pending + engine.num_unseen_tokens + request.num_prompt_tokens - num_cached_tokens
    prefill_seconds = num_tokens / _prefill_rate(engine, neutral)

    decode_step_seconds = neutral.decode_step_seconds
    if load is not None and load.decode_step_seconds is not None:
        decode_step_seconds = load.decode_step_seconds
    num_running = load.num_running_requests if load else neutral.num_running_requests
    decode_seconds = _num_steps(engine, num_tokens) * decode_step_seconds * min(1.0, num_running)

    wait_seconds = prefill_seconds + decode_seconds + _seat_seconds(engine, decode_step_seconds)
    return Forecast(wait_seconds, num_cached_tokens)


def seconds_until_room(num_queued_tokens: int, engines: Sequence[EngineFacts], neutral: NeutralLoad) -> float:
    """Predict when ``engines`` will have prefilled what waits at them and in the router's queue."""
    rate = sum(_prefill_rate(engine, neutral) for engine in engines) or neutral.prefill_tokens_per_second
    return (num_queued_tokens + sum(engine.num_waiting_tokens for engine in engines)) / rate


def _prefill_rate(engine: EngineFacts, neutral: NeutralLoad) -> float:
    measured = engine.load.prefill_tokens_per_second if engine.load else None
    return neutral.prefill_tokens_per_second if measured is None else measured


def _num_steps(engine: EngineFacts, num_tokens: float) -> int:
    capacity = engine.identity.capacity
    return 1 if capacity is None else math.ceil(num_tokens / capacity.max_num_batched_tokens)


def _seat_seconds(engine: EngineFacts, decode_step_seconds: float) -> float:
    capacity = engine.identity.capacity
    if capacity is None:
        return 0.0
    num_ahead = max(0, engine.num_requests + 1 - capacity.max_num_seqs)
    # All seats together free one seat in every (output tokens / seats) steps.
    return num_ahead * decode_step_seconds * NEUTRAL_OUTPUT_TOKENS / capacity.max_num_seqs


def _mean(values: Iterable[float | None], default: float) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else default
