"""Changes to one sequence's logits before a token is chosen.

Owns biases, penalties and masks, each a small object without state: what has been emitted is an argument, so a
resumed sequence is treated as if it had never stopped. It must not know temperature, filters or draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.errors import InvalidRequest
from services.worker.step import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """All tokens of a sequence that are known when its next one is chosen."""

    token_ids: NDArray[np.int32]  # [num_tokens]
    num_prompt_tokens: int

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        """The output so far."""
        return self.token_ids[self.num_prompt_tokens :]


class LogitsProcessor(Protocol):
    """One change to the logits of one sequence."""

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Change ``logits`` ``[vocab_size]`` fp32 in place."""
        ...


def make_processors(
    params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[LogitsProcessor, ...]:
    """Return what ``params`` ask for, masks first, then biases, then penalties.

    Raises:
        InvalidRequest: when a token id lies outside the vocabulary.
    """
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("bad_words", [token_id for word in params.bad_words for token_id in word], vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    processors: list[LogitsProcessor] = []
    if params.allowed_token_ids:
        processors.append(AllowedTokens(params.allowed_token_ids))
    if params.bad_words:
        processors.append(BadWords(params.bad_words))
    end_token_ids = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
    if params.min_output_tokens and end_token_ids:
        processors.append(MinOutputTokens(params.min_output_tokens, end_token_ids))
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(OutputPenalties(params.presence_penalty, params.frequency_penalty))
    return tuple(processors)


class AllowedTokens:
    """Masks all tokens but some."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = torch.tensor(token_ids)

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Keep the logits of the allowed tokens only."""
        allowed = logits[self._token_ids]
        logits.fill_(-math.inf)
        logits[self._token_ids] = allowed


class BadWords:
    """Masks the last token of each sequence that would be completed by it, wherever it began."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._beginnings = [np.array(word[:-1], dtype=np.int32) for word in words]
        self._last_token_ids = [word[-1] for word in words]

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Mask what the history has begun."""
        for beginning, last_token_id in zip(self._beginnings, self._last_token_ids, strict=True):
            tail = history.token_ids[len(history.token_ids) - len(beginning) :]
            if len(beginning) <= len(history.token_ids) and np.array_equal(tail, beginning):
                logits[last_token_id] = -math.inf


class MinOutputTokens:
    """Masks end tokens while the output is too short."""

    def __init__(self, min_output_tokens: int, end_token_ids: Sequence[int]) -> None:
        self._min_output_tokens = min_output_tokens
        self._end_token_ids = torch.tensor(end_token_ids)

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Mask the end tokens if this token may not be the last one."""
        if len(history.output_token_ids) < self._min_output_tokens:
            logits[self._end_token_ids] = -math.inf


class LogitBias:
    """Adds constants to some logits."""

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._token_ids = torch.tensor([token_id for token_id, _ in biases])
        self._biases = torch.tensor([bias for _, bias in biases], dtype=torch.float32)

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Add the biases."""
        logits.index_add_(0, self._token_ids, self._biases)


class RepetitionPenalty:
    """Divides positive and multiplies negative logits of all tokens seen. Keskar et al., CTRL, 2019, 4.1."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Penalize each token of prompt and output once."""
        token_ids = torch.from_numpy(np.unique(history.token_ids).astype(np.int64))
        seen = logits[token_ids]
        logits[token_ids] = torch.where(seen > 0, seen / self._penalty, seen * self._penalty)


class OutputPenalties:
    """Lowers the logits of tokens in the output: once for presence, and for each occurrence."""

    def __init__(self, presence_penalty: float, frequency_penalty: float) -> None:
        self._presence_penalty = presence_penalty
        self._frequency_penalty = frequency_penalty

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Subtract the penalties."""
        token_ids, counts = np.unique(history.output_token_ids, return_counts=True)
        penalties = self._presence_penalty + self._frequency_penalty * counts
        logits.index_add_(
            0, torch.from_numpy(token_ids.astype(np.int64)), torch.from_numpy(-penalties.astype(np.float32))
        )


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise InvalidRequest(
            f"{param} names the token id {outside[0]}, but the vocabulary has {vocab_size} tokens.", param=param
        )
