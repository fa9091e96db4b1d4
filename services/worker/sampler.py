"""The sampler: from logits to one token for each sequence.

Owns the order greedy, temperature, filters, draw, and each slot's parameters. It must not know how logits came
about or what becomes of the tokens. Every operation works on rows by themselves: what a row gets is a function
of its own logits, parameters and history, never of its neighbours.

Filters keep all tokens from a threshold of the scaled logits on, ties included, so the set that remains does
not depend on an order among equals. They apply in the order temperature, min_p, top_k, top_p, where top_p's mass
is that of what the others left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.gumbel import DrawKeys, draw_from_all, draw_from_candidates, split_seed
from services.worker.logits_processors import LogitsProcessor, TokenHistory, make_processors
from services.worker.step import IntArray, SamplingParams

# A temperature below this would overflow; at this value already the most likely token always wins.
_LEAST_TEMPERATURE = 1e-6

# Candidates for which it is faster to compute all their noise than to search all tokens for those that can win.
_MAX_CANDIDATES_EACH = 1_000


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """One token for each row, where the row could be sampled."""

    token_ids: IntArray  # [num_rows]; meaningless where is_valid is false
    is_valid: NDArray[np.bool_]  # [num_rows]


class Sampler:
    """Parameters of all slots and the choice of tokens."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._processors: list[tuple[LogitsProcessor, ...]] = [()] * max_num_seqs
        self._temperature = np.zeros(max_num_seqs)
        # What does not filter is written as the value that keeps everything.
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs)
        self._min_p = np.zeros(max_num_seqs)
        # [max_num_seqs, 3]: low and high word of the seed, choice index
        self._draw_key = np.zeros((max_num_seqs, 3), dtype=np.int64)

    def add(self, slot: int, params: SamplingParams, choice_index: int) -> None:
        """Take the parameters of a new sequence.

        Raises:
            InvalidRequest: when they name a token outside the vocabulary.
        """
        self._processors[slot] = make_processors(params, self._eos_token_ids, self._vocab_size)
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot] = 1.0 if params.top_p is None else params.top_p
        self._min_p[slot] = params.min_p or 0.0
        self._draw_key[slot] = (*split_seed(params.seed), choice_index)

    def has_processors(self, slot: int) -> bool:
        """Whether the sequence's logits are changed, for which its history is needed."""
        return bool(self._processors[slot])

    def sample(
        self, logits: Tensor, slots: IntArray, positions: IntArray, histories: dict[int, TokenHistory]
    ) -> SampledRows:
        """Choose a token for each row of ``logits`` ``[num_rows, vocab_size]`` fp32, which is changed.

        Args:
            logits: as the model gave them.
            slots: whose row it is.
            positions: number of output tokens that each sequence has already.
            histories: by row, for the rows whose slot has processors.
        """
        # A sum is finite only if all its terms are.
        is_finite = torch.isfinite(logits.sum(-1))
        logits[~is_finite] = 0.0
        for row, history in histories.items():
            for processor in self._processors[slots[row]]:
                processor.apply(logits[row], history)
        greatest, chosen = logits.max(-1)
        # All tokens may be masked, for example when only end tokens are allowed and the output is too short.
        is_valid = is_finite & torch.isfinite(greatest)
        is_drawn = torch.from_numpy(self._temperature[slots] > 0) & is_valid
        if is_drawn.any():
            rows = np.flatnonzero(is_drawn.numpy())
            index = torch.from_numpy(rows)
            chosen[index] = self._draw(
                _take(logits, index), greatest[index], chosen[index], slots[rows], positions[rows]
            )
        return SampledRows(chosen.numpy(), is_valid.numpy())

    def _draw(
        self, logits: Tensor, greatest: Tensor, best_ids: Tensor, slots: IntArray, positions: IntArray
    ) -> Tensor:
        temperature = torch.from_numpy(np.maximum(self._temperature[slots], _LEAST_TEMPERATURE)).float()
        scores = logits.sub_(greatest[:, None]).div_(temperature[:, None])  # The greatest is 0.
        seed_low, seed_high, choice = torch.from_numpy(self._draw_key[slots]).unbind(1)
        keys = DrawKeys(seed_low, seed_high, choice, torch.from_numpy(positions))
        is_filtered = (
            (self._top_k[slots] < self._vocab_size) | (self._top_p[slots] < 1.0) | (self._min_p[slots] > 0.0)
        )
        chosen = torch.empty_like(best_ids)
        for rows, draw in (
            (np.flatnonzero(is_filtered), self._draw_filtered),
            (np.flatnonzero(~is_filtered), _draw_all),
        ):
            if len(rows):
                index = torch.from_numpy(rows)
                chosen[index] = draw(_take(scores, index), best_ids[index], keys.take(index), slots[rows])
        return chosen

    def _draw_filtered(self, scores: Tensor, best_ids: Tensor, keys: DrawKeys, slots: IntArray) -> Tensor:
        filters = Filters(
            top_k=torch.from_numpy(self._top_k[slots]),
            top_p=torch.from_numpy(self._top_p[slots]),
            min_p=torch.from_numpy(self._min_p[slots]),
        )
        is_kept = scores >= filters.thresholds(scores)[:, None]
        if is_kept.sum() <= _MAX_CANDIDATES_EACH * len(scores):
            return draw_from_candidates(scores, is_kept, keys)
        # The same result: what is masked cannot win.
        return draw_from_all(scores.masked_fill_(~is_kept, -math.inf), best_ids, keys)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Return some rows, without a copy if they are all: rows of logits are large."""
    return rows if len(index) == len(rows) else rows[index]


def _draw_all(scores: Tensor, best_ids: Tensor, keys: DrawKeys, slots: IntArray) -> Tensor:
    return draw_from_all(scores, best_ids, keys)


@dataclass(frozen=True, slots=True, eq=False)
class Filters:
    """What some rows keep; ``top_k`` int64, ``top_p`` and ``min_p`` fp64, each ``[num_rows]``."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def thresholds(self, scores: Tensor) -> Tensor:
        """Return the least score that each row keeps, for ``scores`` ``[num_rows, vocab_size]`` of at most 0."""
        ranked = _ranked(scores)
        kth = ranked.gather(1, (self.top_k - 1)[:, None])[:, 0]
        floor = torch.maximum(kth, self.min_p.log().to(scores.dtype))
        if not (self.top_p < 1.0).any():
            return floor
        mass = ranked.exp().mul_(ranked >= floor[:, None]).cumsum(-1, dtype=torch.float64)
        # The first place at which the mass is reached; what is kept from there on has no mass to add.
        last = torch.searchsorted(mass, (self.top_p * mass[:, -1])[:, None])
        nucleus = ranked.gather(1, last)[:, 0]
        return torch.where(self.top_p < 1.0, torch.maximum(floor, nucleus), floor)


def _ranked(scores: Tensor) -> Tensor:
    """Return each row in falling order."""
    # numpy sorts values alone, several times as fast as torch, which sorts their places along with them.
    return torch.from_numpy(np.sort(scores.neg().numpy(), axis=-1)).neg_()
