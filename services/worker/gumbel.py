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
from numpy.typing import NDArray

from services.worker.exact_math import log_of
from services.worker.philox import Words, Words4, philox4x32

TokenIds = NDArray[np.int64]

_COARSE_DOMAIN, _FINE_DOMAIN = 0, 1
_TOKENS_PER_BLOCK = 16
_WORD_MASK = 0xFFFFFFFF

# Noise of a token whose coarse byte is not the greatest one stays below this; the margin covers rounding to fp32.
_BOUND_BELOW_TOP_BYTE = -math.log(-math.log(255 / 256)) + 0.01

# Candidates for which it is faster to compute all their noise than to search all tokens for those that can win.
_MAX_CANDIDATES_EACH = 1_000


@dataclass(frozen=True, slots=True)
class DrawKey:
    """What the draw of one row depends on; 32-bit values."""

    seed_low: int
    seed_high: int
    choice: int
    position: int


def split_seed(seed: int) -> tuple[int, int]:
    """Return the low and the high word of an unsigned 64-bit seed."""
    return seed & _WORD_MASK, seed >> 32


def gumbel_noise(key: DrawKey, token_ids: TokenIds) -> NDArray[np.float64]:
    """Return the noise of each token, ``[num_tokens]``."""
    words = np.stack(_blocks(key, token_ids // _TOKENS_PER_BLOCK, _COARSE_DOMAIN), -1)
    offsets = token_ids % _TOKENS_PER_BLOCK
    word = words[np.arange(len(token_ids)), offsets // 4]
    coarse = (word >> (offsets % 4 * 8).astype(np.uint64)) & np.uint64(0xFF)
    fine = _blocks(key, token_ids, _FINE_DOMAIN)[0]
    uniform = (((coarse << np.uint64(32)) + fine).astype(np.float64) + 0.5) * 2.0**-40
    return -log_of(-log_of(uniform))


def draw(scores: NDArray[np.float32], is_kept: NDArray[np.bool_], best_id: int, key: DrawKey) -> int:
    """Return the id with the greatest noisy score among those kept; ``best_id`` has the greatest score of them."""
    candidates = np.flatnonzero(is_kept)
    if len(candidates) > _MAX_CANDIDATES_EACH:
        candidates = np.flatnonzero(is_kept & _can_win(scores, best_id, key))
    return draw_from_candidates(scores, candidates, key)


def draw_from_candidates(scores: NDArray[np.float32], candidates: TokenIds, key: DrawKey) -> int:
    """Return the candidate with the greatest noisy score; of equals the lowest id."""
    noisy = scores[candidates].astype(np.float64) + gumbel_noise(key, candidates)
    return int(candidates[np.argmax(noisy)])


def _can_win(scores: NDArray[np.float32], best_id: int, key: DrawKey) -> NDArray[np.bool_]:
    """Return what can beat ``best_id``, and that itself.

    Its noisy score is a bound: a token can only win if its score is near it or its coarse byte is the greatest one.
    """
    bound = float(scores[best_id]) + float(gumbel_noise(key, np.array([best_id]))[0])
    can_win: NDArray[np.bool_] = (scores >= np.float32(bound - _BOUND_BELOW_TOP_BYTE)) | (
        _coarse_bytes(key, len(scores)) == 255
    )
    can_win[best_id] = True
    return can_win


def _coarse_bytes(key: DrawKey, vocab_size: int) -> NDArray[np.uint8]:
    """Return the coarse bytes of all tokens, ``[vocab_size]``."""
    blocks = np.arange(-(-vocab_size // _TOKENS_PER_BLOCK))
    words = np.stack(_blocks(key, blocks, _COARSE_DOMAIN), -1).astype("<u4")
    return words.reshape(-1).view(np.uint8)[:vocab_size]


def _blocks(key: DrawKey, first_word: TokenIds, domain: int) -> Words4:
    def word(value: int) -> Words:
        return np.array([value], dtype=np.uint64)

    counter = (first_word.astype(np.uint64), word(key.position), word(key.choice), word(domain))
    return philox4x32(counter, (word(key.seed_low), word(key.seed_high)))
