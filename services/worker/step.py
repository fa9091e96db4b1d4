"""A step's domain types: what a runner is asked, what it answers, and the interface of a runner.

Owns the words in which the worker's parts talk to each other. It must not know protobuf, gRPC or torch, so
that the stub runner and the wire layer work without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libs.errors import ClientError, InvalidRequest
from libs.grammar import Grammar
from libs.logprobs import TokenLogprobs
from services.worker.step_work import MachineLimits, StepWork

IntArray = NDArray[np.int64]

_MAX_SEED = 2**64 - 1
# Whoever knows a group's id may join it.
_MIN_GROUP_ID_LENGTH = 16


class SequenceFailure(StrEnum):
    """Why a sequence could not go on."""

    INVALID_LOGITS = "invalid_logits"
    REFUSED = "refused"
    NO_TOKEN_LEFT = "no_token_left"
    NOT_READY = "not_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one sequence are chosen; the defaults choose greedily.

    Limits and stop conditions that only the engine applies are not part of it, with one exception: end tokens
    are masked while fewer than ``min_output_tokens`` exist, which must happen before a token is drawn.

    Raises:
        InvalidRequest: when a value is outside its range.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int = 0
    min_output_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int | None = None  # alternatives beside each output token's log-probability; None wants neither
    num_prompt_logprobs: int | None = None  # the same for prompt tokens
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.temperature < math.inf, "temperature", "a finite number of at least 0", self.temperature
        )
        if self.top_p is not None:
            _require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        if self.top_k is not None:
            _require(self.top_k >= 1, "top_k", "at least 1", self.top_k)
        if self.min_p is not None:
            _require(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        _require(0 <= self.seed <= _MAX_SEED, "seed", "an unsigned 64-bit number", self.seed)
        for name in ("presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), name, "a finite number", getattr(self, name))
        _require(
            0.0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            "a finite number above 0",
            self.repetition_penalty,
        )
        for token_id, bias in self.logit_bias:
            _require(math.isfinite(bias), f"logit_bias[{token_id}]", "a finite number", bias)
        for name in ("num_logprobs", "num_prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or count >= 0, name, "at least 0", count)
        for word in self.bad_words:
            _require(len(word) > 0, "bad_words", "made of sequences of at least one token", word)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a draw."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, eq=False)
class NewSequence:
    """A sequence that the runner does not know yet; a resumed one brings its output along."""

    slot: int
    token_ids: IntArray  # [num_tokens]: prompt and output so far
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: IntArray  # [num_blocks] held before this step's new ones
    sampling_params: SamplingParams
    choice_index: int


@dataclass(frozen=True, slots=True)
class RefusedSequence:
    """A new sequence that asks for what this worker does not serve; it fails instead of being half served."""

    slot: int
    error: ClientError


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """One step as a difference to what the runner knows; arrays from ``slots`` on have an entry per sequence."""

    step_id: int
    ended_slots: IntArray
    new_sequences: tuple[NewSequence, ...]
    refused_sequences: tuple[RefusedSequence, ...]
    slots: IntArray  # [num_seqs]
    num_scheduled_tokens: IntArray  # [num_seqs]
    num_new_blocks: IntArray  # [num_seqs]
    new_block_ids: IntArray  # [sum of num_new_blocks]
    copy_source_block_ids: IntArray  # [num_copies] copied before anything is computed
    copy_target_block_ids: IntArray  # [num_copies]
    num_draft_tokens: IntArray  # [num_seqs]: how many of the scheduled tokens are drafts, the last ones
    draft_token_ids: IntArray  # [sum of num_draft_tokens]


@dataclass(frozen=True, slots=True)
class FailedSequence:
    """A sequence that could not go on, with a sentence for the one who asked."""

    slot: int
    failure: SequenceFailure
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class OutputLogprobs:
    """Log-probabilities of the tokens that ``slots`` got, in order; a slot comes once for each of its tokens."""

    slots: IntArray
    tokens: TokenLogprobs

    @classmethod
    def none(cls) -> OutputLogprobs:
        """Return those of a step in which nobody wanted any."""
        return cls(np.empty(0, dtype=np.int64), TokenLogprobs.none())


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of prompt tokens: of ``num_tokens[i]`` of ``slots[i]``, from position ``positions[i]`` on.

    A token's are known when the token before it is computed, so a prompt's first has none.
    """

    slots: IntArray
    positions: IntArray
    num_tokens: IntArray
    tokens: TokenLogprobs

    @classmethod
    def none(cls) -> PromptLogprobs:
        """Return those of a step in which nobody wanted any."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing, nothing, TokenLogprobs.none())


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """What a forward pass led to: ``slots[i]`` got ``num_tokens[i]`` of ``token_ids``; and who failed in it."""

    slots: IntArray
    num_tokens: IntArray
    token_ids: IntArray
    failed_sequences: tuple[FailedSequence, ...]
    logprobs: OutputLogprobs
    prompt_logprobs: PromptLogprobs

    @classmethod
    def none(cls) -> SampledTokens:
        """Return the result of computing nothing."""
        no_ids = np.empty(0, dtype=np.int64)
        return cls(no_ids, no_ids, no_ids, (), OutputLogprobs.none(), PromptLogprobs.none())


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step sampled: ``slots[i]`` got ``num_tokens[i]`` of ``token_ids``, in order."""

    step_id: int
    slots: IntArray
    num_tokens: IntArray
    token_ids: IntArray
    failed_sequences: tuple[FailedSequence, ...]
    logprobs: OutputLogprobs
    prompt_logprobs: PromptLogprobs
    num_computed_tokens: int
    duration_seconds: float
    exchange_wait_seconds: float = 0.0  # of the duration, waiting for other ranks
    work: StepWork | None = None  # None when nothing was computed, or by the stub

    @classmethod
    def of(
        cls,
        step: StepInput,
        sampled: SampledTokens,
        refused: tuple[FailedSequence, ...],
        *,
        num_computed_tokens: int,
        duration_seconds: float,
        exchange_wait_seconds: float = 0.0,
        work: StepWork | None = None,
    ) -> StepResult:
        """Put a step's result together."""
        return cls(
            step_id=step.step_id,
            slots=sampled.slots,
            num_tokens=sampled.num_tokens,
            token_ids=sampled.token_ids,
            failed_sequences=(*refused, *sampled.failed_sequences),
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            num_computed_tokens=num_computed_tokens,
            duration_seconds=duration_seconds,
            exchange_wait_seconds=exchange_wait_seconds,
            work=work,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What a rank is asked to serve, and with whom: ranks that are given one group's id compute together."""

    rank: int
    tensor_parallel_size: int
    group_id: str = ""  # of this forming of the group; empty for a lone rank
    block_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _require(
            self.max_model_len is None or self.max_model_len >= 1, "max_model_len", "at least 1", self.max_model_len
        )
        _require(self.tensor_parallel_size >= 1, "tensor_parallel_size", "at least 1", self.tensor_parallel_size)
        _require(0 <= self.rank < self.tensor_parallel_size, "rank", "one of the group's", self.rank)
        _require(
            self.tensor_parallel_size == 1 or len(self.group_id) >= _MIN_GROUP_ID_LENGTH,
            "group_id",
            f"of at least {_MIN_GROUP_ID_LENGTH} characters where there are several ranks",
            self.group_id,
        )


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is."""

    description: str
    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine must know of the model."""

    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: bytes
    vocab_size: int
    gpu_type: str
    total_vram_bytes: int
    kv_cache_bytes: int
    weights_bytes: int
    limits: MachineLimits | None = None  # None where they were not measured


class ModelRunner(Protocol):
    """Turns steps into tokens. All methods are called from one thread."""

    def load(self, request: LoadRequest, on_progress: Callable[[LoadProgress], None]) -> LoadedModel:
        """Load the weights and allocate the KV cache.

        Raises:
            ModelLoadFailed: when the model cannot be served here.
        """
        ...

    def execute(self, step: StepInput) -> StepResult:
        """Run one step.

        Raises:
            InternalError: when the step contradicts what the runner knows.
        """
        ...

    def reset(self) -> None:
        """Forget all sequences; what is in the KV cache stays."""
        ...


def _require(is_fulfilled: bool, param: str, expectation: str, value: object) -> None:
    if not is_fulfilled:
        raise InvalidRequest(f"{param} must be {expectation}, not {value!r}.", param=param)
