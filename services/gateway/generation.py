"""What a gateway asks of an engine and what it hears back, as the gateway's own types.

Owns no behaviour but sums. Nothing here knows the wire, HTTP or text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeAlias

from libs.errors import OctavoError
from libs.grammar import Grammar
from libs.kv import SharedPrefix
from services.gateway.engine_times import EngineStall, FirstTokenReport

# Choices of one request at most; bounds what its stream can have to say of it.
MAX_CHOICES: Final = 128


class FinishReason(StrEnum):
    """Why an engine ended an output well."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop; what is None or has its default is off."""

    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int
    max_output_tokens: int
    min_output_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    # Alternatives to report beside each token's own log-probability; None reports nothing.
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ChoiceStart:
    """A choice as an engine takes it: which of the request's it is, and its output by engines before."""

    index: int
    output_token_ids: Sequence[int] = ()


def new_choices(num_choices: int) -> tuple[ChoiceStart, ...]:
    """Return so many choices that nobody has begun."""
    return tuple(ChoiceStart(index) for index in range(num_choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A whole request as an engine takes it; the time left is added when it is sent."""

    request_id: str
    tenant_id: str
    traceparent: str | None
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    cache_salt: bytes
    shared_prefix: SharedPrefix | None = None
    choices: tuple[ChoiceStart, ...] = (ChoiceStart(0),)
    priority: int = 0
    # With it the engine tells its timings, and every gap between two tokens that is longer.
    stall_bound_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What a request cost the engine; durations are the engine's own."""

    # As of the first scheduling; None where the engine was lost before it could tell.
    num_cached_tokens: int | None
    num_output_tokens: int
    num_discarded_tokens: int
    num_preemptions: int
    queue_seconds: float
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    # Where timings were asked for: the first gaps beyond the bound, and how many there were.
    stalls: tuple[EngineStall, ...] = ()
    num_stalls: int = 0

    def plus_choice(self, other: EngineUsage) -> EngineUsage:
        """Add another choice of the same request: its prompt was computed and waited once."""
        return replace(
            self,
            num_output_tokens=self.num_output_tokens + other.num_output_tokens,
            num_discarded_tokens=self.num_discarded_tokens + other.num_discarded_tokens,
            num_preemptions=self.num_preemptions + other.num_preemptions,
        )

    def plus_try(self, other: EngineUsage) -> EngineUsage:
        """Add what another engine did for the same choice after this one; its prompt counts once."""
        return replace(
            self.plus_choice(other),
            decode_seconds=self.decode_seconds + other.decode_seconds,
            stalls=self.stalls + other.stalls,
            num_stalls=self.num_stalls + other.num_stalls,
        )

    @classmethod
    def untold(cls, num_output_tokens: int) -> EngineUsage:
        """Return that of an engine that was lost: all that is known is what came from it."""
        return cls(None, num_output_tokens, num_discarded_tokens=0, num_preemptions=0, queue_seconds=0.0)


@dataclass(frozen=True, slots=True)
class GenerationFinished:
    """An output ended well, or was aborted."""

    reason: FinishReason
    stop_token_id: int | None
    usage: EngineUsage


@dataclass(frozen=True, slots=True)
class GenerationFailed:
    """An output ended with an error; ``usage`` is None when the engine could not tell it."""

    error: OctavoError
    usage: EngineUsage | None


GenerationEnd: TypeAlias = GenerationFinished | GenerationFailed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and rank, and those of the likeliest tokens in its place, the likeliest first.

    Natural, of the model's distribution as it was before any parameter. ``alternatives`` are pairs of token id and
    log-probability.
    """

    logprob: float
    rank: int
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ChoiceStep:
    """Tokens of one choice of a request since the last look, and its end if it came with them and is a good one."""

    choice_index: int
    token_ids: list[int]
    end: GenerationFinished | None
    # One for each token where they are wanted.
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Everything that one engine step did for this gateway; ``token_ids`` lie one handle after the other.

    Log-probabilities are there for the handles that want them: of the step's tokens, and of the next prompt tokens.
    """

    started: list[tuple[str, list[int]]]
    handles: list[int]
    num_tokens: list[int]
    token_ids: list[int]
    ends: list[tuple[int, GenerationEnd]]
    output_logprobs: Mapping[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, list[TokenLogprob]] = field(default_factory=dict)
    # Where timings were asked for: how first tokens came about by handle, how long accepting took by request.
    step_id: int = 0
    first_tokens: Mapping[int, FirstTokenReport] = field(default_factory=dict)
    accept_seconds: Mapping[str, float] = field(default_factory=dict)
