"""What the engine tells of a request's time, where it was asked: how its first token came, and why tokens stalled.

Owns the reasons and the bound on what is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

# Stalls that are kept of one sequence, the first ones; the others are counted.
MAX_STALLS: Final = 32


class CacheMissReason(StrEnum):
    """Why prompt tokens were computed and not taken from the prefix cache."""

    NOT_SEEN = "not_seen"
    EVICTED = "evicted"
    BEHIND_GAP = "behind_gap"
    TAIL = "tail"
    PROMPT_LOGPROBS = "prompt_logprobs"
    CACHING_OFF = "caching_off"


class StallReason(StrEnum):
    """Why a token came late."""

    PREEMPTION = "preemption"
    PREFILL = "prefill"
    LONG_STEP = "long_step"
    ENGINE_WAIT = "engine_wait"


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap between two tokens of a sequence that was longer than the request's bound.

    ``step_seconds`` is the time of the step that ended it, ``num_prefill_tokens`` the prompt tokens in it.
    """

    step_id: int
    gap_seconds: float
    reason: StallReason
    step_seconds: float
    num_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How a sequence's first token came about; ``misses`` adds up to the prompt tokens that were not cached."""

    handle: int
    owner: int
    queue_seconds: float
    prefill_seconds: float
    num_cached_tokens: int
    misses: Mapping[CacheMissReason, int]


@dataclass(slots=True)
class Timings:
    """What is kept of one sequence that asked."""

    misses: Mapping[CacheMissReason, int] = field(default_factory=dict)
    stalls: list[Stall] = field(default_factory=list)
    num_stalls: int = 0
    # When its last token came; before the first, no gap is too long.
    last_token_time: float = math.inf
    # How often it had been preempted then.
    num_preemptions_seen: int = 0

    def add(self, stall: Stall) -> None:
        """Keep a stall, or count it where enough are kept."""
        self.num_stalls += 1
        if len(self.stalls) < MAX_STALLS:
            self.stalls.append(stall)
