"""Gumbel noise for drawing tokens: a pure function of seed, choice, output position and token id.

Owns how a token's noise is derived and the exact search for the best noisy score. It must not know temperature,
filters or where scores come from.

A token's uniform number has 40 bits, ``u = (coarse * 2**32 + fine + 0.5) / 2**40``, and its noise is
``-log(-log(u))``. The coarse byte is byte ``id % 16`` (little-endian within words, words in order) of the
Philox block with counter ``(id // 16, position, choice, 0)``, the fine word is word 0 of the block with counter
``(id, position, choice, 1)``; the key is the seed, low word first. So one block gives the coarse bytes of 16
tokens, and a fine word is needed only where the coarse byte leaves a chance to win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.philox import philox4x32

_COARSE_DOMAIN, _FINE_DOMAIN = 0, 1
_TOKENS_PER_BLOCK = 16
_WORD_MASK = 0xFFFFFFFF

# Noise of a token whose coarse byte is not the greatest one stays below this; the margin covers rounding to fp32.
_BOUND_BELOW_TOP_BYTE = -math.log(-math.log(255 / 256)) + 0.01

# Rows whose coarse bytes are computed at a time, so that the words stay in the processor's cache.
_ROWS_AT_A_TIME = 4


@dataclass(frozen=True, slots=True, eq=False)
class DrawKeys:
    """What the draws of some rows depend on; all int64 ``[num_rows]``."""

    seed_low: Tensor
    seed_high: Tensor
    choice: Tensor
    position: Tensor

    def take(self, rows: Tensor | slice) -> DrawKeys:
        """Return the keys of ``rows``, which may repeat."""
        return DrawKeys(self.seed_low[rows], self.seed_high[rows], self.choice[rows], self.position[rows])


def gumbel_noise(keys: DrawKeys, token_ids: Tensor) -> Tensor:
    """Return the noise of token ``token_ids[i]`` under ``keys[i]``, fp64 ``[num_pairs]``."""
    words = torch.stack(_blocks(keys, token_ids // _TOKENS_PER_BLOCK, _COARSE_DOMAIN), -1)
    offsets = token_ids % _TOKENS_PER_BLOCK
    word = words.gather(-1, (offsets // 4)[:, None])[:, 0]
    coarse = (word >> (offsets % 4 * 8)) & 0xFF
    fine = _blocks(keys, token_ids, _FINE_DOMAIN)[0]
    uniform = ((coarse << 32) + fine).double().add_(0.5).mul_(2.0**-40)
    return uniform.log_().neg_().log_().neg_()


def draw_from_all(scores: Tensor, best_ids: Tensor, keys: DrawKeys) -> Tensor:
    """Return the id with the greatest noisy score of each row of ``scores`` ``[num_rows, vocab_size]``.

    ``best_ids`` are the ids of the greatest scores, whose noisy scores are a bound: a token can only win if its
    score is near the bound or its coarse byte is the greatest one.
    """
    best_scores = scores.gather(1, best_ids[:, None])[:, 0].double()
    bounds = best_scores + gumbel_noise(keys, best_ids)
    can_win = scores >= (bounds - _BOUND_BELOW_TOP_BYTE)[:, None].to(scores.dtype)
    for first in range(0, len(scores), _ROWS_AT_A_TIME):
        rows = slice(first, first + _ROWS_AT_A_TIME)
        can_win[rows] |= _coarse_bytes(keys.take(rows), scores.shape[1]) == 255
    can_win.scatter_(1, best_ids[:, None], True)
    return draw_from_candidates(scores, can_win, keys)


def draw_from_candidates(scores: Tensor, is_candidate: Tensor, keys: DrawKeys) -> Tensor:
    """Return the id with the greatest noisy score among the candidates of each row; each row needs one."""
    # numpy finds few places among many in a fifth of torch's time.
    places = torch.from_numpy(np.flatnonzero(is_candidate.numpy()))
    rows, token_ids = places // scores.shape[1], places % scores.shape[1]
    noisy = scores[rows, token_ids].double() + gumbel_noise(keys.take(rows), token_ids)
    best = torch.full((len(scores),), -math.inf, dtype=torch.float64).scatter_reduce_(0, rows, noisy, "amax")
    is_best = noisy == best[rows]
    # Of equals the lowest id wins, so that the result does not depend on the order of candidates.
    winners = torch.full((len(scores),), scores.shape[1], dtype=torch.int64)
    return winners.scatter_reduce_(0, rows[is_best], token_ids[is_best], "amin")


def _coarse_bytes(keys: DrawKeys, vocab_size: int) -> Tensor:
    """Return the coarse bytes of all tokens, uint8 ``[num_rows, vocab_size]``."""
    blocks = torch.arange(-(-vocab_size // _TOKENS_PER_BLOCK))[None]
    column = DrawKeys(*(values[:, None] for values in (keys.seed_low, keys.seed_high, keys.choice, keys.position)))
    words = torch.stack(_blocks(column, blocks, _COARSE_DOMAIN), -1)
    return words.to(torch.int32).view(torch.uint8).flatten(1)[:, :vocab_size]


def _blocks(keys: DrawKeys, first_word: Tensor, domain: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counter = (first_word, keys.position, keys.choice, torch.tensor(domain))
    return philox4x32(counter, (keys.seed_low, keys.seed_high))


def split_seed(seed: int) -> tuple[int, int]:
    """Return the low and the high word of an unsigned 64-bit seed."""
    return seed & _WORD_MASK, seed >> 32
