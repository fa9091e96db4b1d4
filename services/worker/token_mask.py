"""Packed masks of tokens, and who fills them.

Owns the layout, the one of llguidance and xgrammar: bit ``i`` of word ``j`` stands for token ``32 * j + i``, and a
set bit allows it. It must not know what a grammar is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[np.int32]

TOKENS_PER_WORD = 32


class TokenMatcher(Protocol):
    """Follows one sequence's output and says which tokens may come next. All calls are from the runner's thread."""

    @property
    def is_prepared(self) -> bool:
        """Whether masks can be filled without waiting for what is prepared elsewhere."""
        ...

    @property
    def failure(self) -> str | None:
        """Why masks allow nothing, as a sentence for the one who asked; None while nothing is wrong."""
        ...

    def prepare(self, timeout_seconds: float) -> bool:
        """Wait until masks can be filled; False when that takes longer than ``timeout_seconds``."""
        ...

    def fill_mask(self, mask: TokenMask) -> None:
        """Write all words of ``mask`` ``[num_mask_words]``: the tokens that may follow what has been accepted."""
        ...

    def accept(self, token_id: int) -> None:
        """Note that the sequence goes on with this token, which the last mask allowed."""
        ...


def num_mask_words(vocab_size: int) -> int:
    """Return the words of a mask."""
    return -(-vocab_size // TOKENS_PER_WORD)


def mask_of(token_ids: Sequence[int], vocab_size: int) -> TokenMask:
    """Return the mask that allows these tokens."""
    bits = np.zeros(num_mask_words(vocab_size) * TOKENS_PER_WORD, dtype=np.uint8)
    bits[np.asarray(token_ids, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


def allowed_of(mask: TokenMask, vocab_size: int) -> NDArray[np.bool_]:
    """Return the mask as one truth value for each token, ``[vocab_size]``."""
    words = np.ascontiguousarray(mask, dtype="<i4")
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)
