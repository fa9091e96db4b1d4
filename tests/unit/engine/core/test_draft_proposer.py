"""What is proposed after what was said before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.core.draft_proposer import MAX_LOOK_BACK_TOKENS, DraftProposer
from services.engine.core.scheduler_config import SpeculationConfig
from tests.fakes.scheduling_rules import read_on


def propose(token_ids: Sequence[int], num_drafts: int, shortest: int = 2, longest: int = 4) -> list[int]:
    proposal: list[int] = (
        DraftProposer(shortest, longest).propose(np.array(token_ids, np.uint32), num_drafts).tolist()
    )
    return proposal


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5]),
        # The longest match goes before a later one, and of equally long ones the latest is taken.
        ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], [7, 2, 3]),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),
        # A period that is shorter than the proposal goes on.
        ([5, 5, 5], [5, 5, 5]),
        ([0, 6, 7, 6, 7, 6], [7, 6, 7]),
        ([1, 2, 3], []),
        ([1, 2], []),
        ([1], []),
    ],
)
def test_proposes_what_followed_last_time(token_ids: list[int], expected: list[int]) -> None:
    assert propose(token_ids, 3) == expected


def test_one_token_in_common_is_too_little() -> None:
    assert propose([1, 2, 3, 1], 3) == []
    assert propose([1, 2, 3, 1], 3, shortest=1) == [2, 3, 1]


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    num_drafts=st.integers(1, 9),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_equals_a_search_in_plain_loops(token_ids: list[int], num_drafts: int, shortest: int, more: int) -> None:
    config = SpeculationConfig(min_ngram_tokens=shortest, max_ngram_tokens=shortest + more)

    assert propose(token_ids, num_drafts, shortest, shortest + more) == read_on(token_ids, config, num_drafts)


def test_what_lies_further_back_than_the_bound_is_not_looked_at() -> None:
    beginning, middle = [1, 2, 3], list(range(10, 10 + MAX_LOOK_BACK_TOKENS - 2))

    assert propose([*beginning, *middle[:-3], 1, 2], 1) == [3]
    assert propose([*beginning, *middle, 1, 2], 1) == []
