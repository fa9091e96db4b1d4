"""Counter-based random numbers: Philox4x32-10 on torch tensors.

Owns the generator alone. It must not know what the numbers are for. A number is a pure function of key and
counter, so there is no state to save, to restore or to share. Salmon et al., Parallel Random Numbers: As Easy
as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

from torch import Tensor

NUM_ROUNDS = 10

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # The golden ratio and the square root of 3, less one.

Words4 = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words4, key: tuple[Tensor, Tensor]) -> Words4:
    """Return four 32-bit words for each counter.

    All tensors are int64, hold unsigned 32-bit values and broadcast against each other. A product of two such
    values fills all 64 bits; as a signed number it may be negative, but its bits are right, and each half is
    taken with a mask.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for index in range(NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product2 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product2 >> 32).bitwise_and_(_MASK) ^ c1 ^ ((k0 + index * _WEYL[0]) & _MASK),
            product2 & _MASK,
            (product0 >> 32).bitwise_and_(_MASK) ^ c3 ^ ((k1 + index * _WEYL[1]) & _MASK),
            product0 & _MASK,
        )
    return c0, c1, c2, c3
