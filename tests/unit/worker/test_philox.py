from __future__ import annotations

import numpy as np
import pytest

from services.worker.philox import philox4x32

ONES = 0xFFFFFFFF


# Known answers of Random123 1.14.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in counter)
    k0, k1 = (np.array([word], dtype=np.uint64) for word in key)

    words = philox4x32((c0, c1, c2, c3), (k0, k1))

    assert tuple(int(word[0]) for word in words) == expected


def test_broadcasts_counters_against_keys() -> None:
    counters, keys = np.arange(5, dtype=np.uint64), np.array([[3], [ONES]], dtype=np.uint64)
    zero = np.zeros(1, dtype=np.uint64)

    table = philox4x32((counters, zero, zero, zero), (keys, zero))[2]

    assert table.shape == (2, 5)
    alone = philox4x32((counters[4:], zero, zero, zero), (keys[1], zero))[2]
    assert table[1, 4] == alone[0]
