"""Changes to one sequence's logits before a token is chosen.

Owns masks, biases and penalties, and their order. What has been emitted is an argument, so a resumed sequence is
treated as if it had never stopped. It must not know temperature, filters or draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libs.errors import InvalidRequest
from services.worker.step import IntArray, SamplingParams
from services.worker.token_mask import TokenMask, allowed_of, mask_of

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TokenHistory:
    """All tokens of a sequence that are known when its next one is chosen."""

    token_ids: NDArray[np.int32]  # [num_tokens]
    num_prompt_tokens: int

    @property
    def output_token_ids(self) -> NDArray[np.int32]:
        """The output so far."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Constants that are added to some logits; a token occurs once."""

    token_ids: IntArray
    biases: FloatArray


@dataclass(frozen=True, slots=True)
class Penalties:
    """What tokens seen before lose.

    ``repetition`` divides positive and multiplies negative logits of all tokens seen (Keskar et al., CTRL, 2019,
    4.1); ``presence`` is taken once from those in the output, ``frequency`` for each time.
    """

    repetition: float
    presence: float
    frequency: float

    @property
    def are_neutral(self) -> bool:
        """Whether nothing is changed."""
        return self == _NO_PENALTIES


_NO_PENALTIES = Penalties(1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class LogitsEdits:
    """All that is changed in one row: masks first, then biases, then penalties."""

    masks: tuple[TokenMask, ...]  # A token must be allowed by all.
    banned_token_ids: IntArray
    bias: LogitBias
    penalties: Penalties
    history: TokenHistory  # What the penalties are for.

    def apply(self, logits: FloatArray) -> None:
        """Change ``logits`` ``[vocab_size]`` in place."""
        for mask in self.masks:
            logits[~allowed_of(mask, len(logits))] = -math.inf
        logits[self.banned_token_ids] = -math.inf
        np.add.at(logits, self.bias.token_ids, self.bias.biases)
        if self.penalties.repetition != 1.0:
            token_ids = np.unique(self.history.token_ids)
            seen, penalty = logits[token_ids], np.float32(self.penalties.repetition)
            logits[token_ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self.penalties.presence or self.penalties.frequency:
            token_ids, counts = np.unique(self.history.output_token_ids, return_counts=True)
            lost = self.penalties.presence + self.penalties.frequency * counts
            logits[token_ids] -= lost.astype(np.float32)


class TokenBan(Protocol):
    """Tokens that may not come next, by what came before."""

    def banned_after(self, history: TokenHistory) -> Iterator[int]:
        """Yield them."""
        ...


class BadWords:
    """Bans the last token of each sequence of tokens that it would complete, wherever that began."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._beginnings = [np.array(word[:-1], dtype=np.int32) for word in words]
        self._last_token_ids = [word[-1] for word in words]

    def banned_after(self, history: TokenHistory) -> Iterator[int]:
        """Yield what would complete what the history has begun."""
        for beginning, last_token_id in zip(self._beginnings, self._last_token_ids, strict=True):
            tail = history.token_ids[len(history.token_ids) - len(beginning) :]
            if len(beginning) <= len(history.token_ids) and np.array_equal(tail, beginning):
                yield last_token_id


@dataclass(frozen=True, slots=True)
class MinOutputTokens:
    """Bans end tokens while the output is too short."""

    min_output_tokens: int
    end_token_ids: tuple[int, ...]

    def banned_after(self, history: TokenHistory) -> Iterator[int]:
        """Yield the end tokens if the next token may not be the last one."""
        if len(history.output_token_ids) < self.min_output_tokens:
            yield from self.end_token_ids


@dataclass(frozen=True, slots=True, eq=False)
class LogitsRules:
    """What one sequence's parameters ask for, whatever comes."""

    masks: tuple[TokenMask, ...]
    bans: tuple[TokenBan, ...]
    bias: LogitBias
    penalties: Penalties

    @property
    def are_neutral(self) -> bool:
        """Whether nothing is changed."""
        return not (self.masks or self.bans or len(self.bias.token_ids)) and self.penalties.are_neutral

    def edits_after(self, history: TokenHistory, masks: tuple[TokenMask, ...] = ()) -> LogitsEdits:
        """Return what is changed for the token after ``history``, where ``masks`` hold besides our own."""
        banned = [token_id for ban in self.bans for token_id in ban.banned_after(history)]
        return LogitsEdits(
            masks=(*self.masks, *masks),
            banned_token_ids=np.array(banned, dtype=np.int64),
            bias=self.bias,
            penalties=self.penalties,
            history=history,
        )


def make_rules(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> LogitsRules:
    """Return what ``params`` ask for.

    Raises:
        InvalidRequest: when a token id lies outside the vocabulary.
    """
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _check_ids("bad_words", [token_id for word in params.bad_words for token_id in word], vocab_size)
    _check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    bans: list[TokenBan] = []
    if params.bad_words:
        bans.append(BadWords(params.bad_words))
    end_token_ids = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
    if params.min_output_tokens and end_token_ids:
        bans.append(MinOutputTokens(params.min_output_tokens, end_token_ids))
    return LogitsRules(
        masks=(mask_of(params.allowed_token_ids, vocab_size),) if params.allowed_token_ids else (),
        bans=tuple(bans),
        bias=LogitBias(
            np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64),
            np.array([bias for _, bias in params.logit_bias], dtype=np.float32),
        ),
        penalties=Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
    )


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise InvalidRequest(
            f"{param} names the token id {outside[0]}, but the vocabulary has {vocab_size} tokens.", param=param
        )
