"""Counter-based random numbers: Philox4x32-10 on arrays.

Owns the generator alone. It must not know what the numbers are for. A number is a pure function of key and
counter, so there is no state to save, to restore or to share. Salmon et al., Parallel Random Numbers: As Easy
as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 10

_MASK = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)  # The golden ratio and the square root of 3, less one.

Words = NDArray[np.uint64]
Words4 = tuple[Words, Words, Words, Words]


def philox4x32(counter: Words4, key: tuple[Words, Words]) -> Words4:
    """Return four 32-bit words for each counter.

    All arrays are uint64, hold 32-bit values and broadcast against each other; a product of two such values fills
    all 64 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for index in range(NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product2 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product2 >> _HIGH) ^ c1 ^ ((k0 + np.uint64(index * _WEYL[0] & 0xFFFFFFFF)) & _MASK),
            product2 & _MASK,
            (product0 >> _HIGH) ^ c3 ^ ((k1 + np.uint64(index * _WEYL[1] & 0xFFFFFFFF)) & _MASK),
            product0 & _MASK,
        )
    return c0, c1, c2, c3
