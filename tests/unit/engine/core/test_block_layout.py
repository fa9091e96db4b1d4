"""How many blocks a sequence holds."""

from __future__ import annotations

import numpy as np

from services.engine.core.block_layout import ContiguousLayout, PagedLayout


def test_paged_rounds_up_to_whole_blocks() -> None:
    assert PagedLayout(16).blocks_for(np.array([0, 1, 15, 16, 17, 160])).tolist() == [0, 1, 1, 1, 2, 10]


def test_contiguous_holds_the_longest_sequence_from_the_start() -> None:
    assert ContiguousLayout(16, 100).blocks_for(np.array([1, 50, 100])).tolist() == [7, 7, 7]
