"""The prefix index against plain sets, and the numbering that tells whether it can be trusted."""

from __future__ import annotations

import gc
import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.kv import PrefixHash
from services.router.policy.facts import EngineId
from services.router.prefix_index import BlockChanges, EventCursor, PrefixIndex, ResyncNeeded
from tests.unit.router.builders import chain

FIRST, SECOND = EngineId("engine-0"), EngineId("engine-1")


def changes(
    *, removed: tuple[PrefixHash, ...] = (), stored: tuple[PrefixHash, ...] = (), is_cleared: bool = False
) -> BlockChanges:
    return BlockChanges(removed, stored, is_cleared)


def test_matches_the_leading_blocks_only() -> None:
    index = PrefixIndex(max_hashes_per_engine=1000, max_hashes=10_000)
    prompt = chain(5)
    index.replace(FIRST, [prompt[0], prompt[1], prompt[3]])

    assert index.num_matching_blocks(FIRST, prompt) == 2
    assert index.num_matching_blocks(FIRST, prompt[:1]) == 1
    assert index.num_matching_blocks(FIRST, ()) == 0
    assert index.num_matching_blocks(SECOND, prompt) == 0


def test_removing_an_engine_frees_all_that_it_held() -> None:
    """RTR-06."""
    index = PrefixIndex(max_hashes_per_engine=10_000, max_hashes=10_000)
    index.replace(SECOND, chain(3, "other"))
    gc.collect()
    before = sys.getallocatedblocks()
    index.replace(FIRST, chain(1000))
    held = sys.getallocatedblocks() - before

    index.remove(FIRST)

    gc.collect()
    assert held >= 1000
    assert sys.getallocatedblocks() - before < 50
    assert index.num_hashes == 3
    assert index.num_matching_blocks(FIRST, chain(1000)) == 0
    assert index.num_matching_blocks(SECOND, chain(3, "other")) == 3


def test_clearing_one_engine_leaves_the_other() -> None:
    """RTR-06."""
    index = PrefixIndex(max_hashes_per_engine=1000, max_hashes=10_000)
    prompt = chain(4)
    index.replace(FIRST, prompt)
    index.replace(SECOND, prompt)

    index.apply(SECOND, changes(is_cleared=True))

    assert index.num_matching_blocks(SECOND, prompt) == 0
    assert index.num_matching_blocks(FIRST, prompt) == 4
    assert index.num_hashes == 4


def test_clears_first_then_removes_then_stores() -> None:
    index = PrefixIndex(max_hashes_per_engine=1000, max_hashes=10_000)
    prompt = chain(3)
    index.replace(FIRST, prompt[:1])

    index.apply(FIRST, changes(is_cleared=True, removed=prompt[1:2], stored=prompt[1:]))

    assert index.num_hashes_of(FIRST) == 2
    assert index.num_matching_blocks(FIRST, prompt[1:]) == 2


def test_removing_an_unknown_block_leaves_the_rest_of_the_batch_in_force() -> None:
    """RTR-06."""
    index = PrefixIndex(max_hashes_per_engine=1000, max_hashes=10_000)
    prompt, unknown = chain(3), chain(2, "unknown")
    index.replace(FIRST, prompt[:1])

    index.apply(FIRST, changes(removed=(*unknown, prompt[0]), stored=prompt[1:]))

    assert index.num_hashes == 2
    assert index.num_matching_blocks(FIRST, prompt[1:]) == 2


def test_leaves_out_and_counts_what_is_over_the_bound() -> None:
    index = PrefixIndex(max_hashes_per_engine=2, max_hashes=10_000)
    prompt = chain(4)

    index.replace(FIRST, prompt[:3])
    index.apply(FIRST, changes(removed=prompt[:1], stored=prompt[1:]))

    assert index.num_hashes == 2
    assert index.num_matching_blocks(FIRST, prompt[1:]) == 2
    assert index.num_left_out == 2


def test_all_engines_together_have_a_bound_and_what_one_gives_up_is_room_for_others() -> None:
    index = PrefixIndex(max_hashes_per_engine=3, max_hashes=4)
    prompt = chain(3)

    index.replace(FIRST, prompt)
    index.replace(SECOND, prompt)
    assert (index.num_hashes, index.num_left_out) == (4, 2)
    assert index.num_matching_blocks(SECOND, prompt) == 1
    index.remove(FIRST)
    index.replace(SECOND, prompt)

    assert index.num_matching_blocks(SECOND, prompt) == 3
    assert (index.num_hashes, index.num_left_out) == (3, 2)


@pytest.mark.parametrize("sequence_number", [4, 5, 7, 100])
def test_duplicate_old_or_missing_numbers_ask_for_a_snapshot(sequence_number: int) -> None:
    """RTR-06."""
    cursor = EventCursor(1, 5)

    with pytest.raises(ResyncNeeded):
        cursor.advance(1, sequence_number)


@pytest.mark.parametrize("incarnation", [1, 3])
def test_another_incarnation_asks_for_a_snapshot(incarnation: int) -> None:
    with pytest.raises(ResyncNeeded):
        EventCursor(2, 5).advance(incarnation, 6)


def test_the_next_number_advances() -> None:
    assert EventCursor(1, 5).advance(1, 6) == EventCursor(1, 6)


ENGINES = st.sampled_from([FIRST, SECOND, EngineId("engine-2")])
HASHES = st.lists(st.sampled_from(chain(8)), max_size=6).map(tuple)


class IndexAgainstSets(RuleBasedStateMachine):
    """The index does what plain sets do."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_hashes_per_engine=1000, max_hashes=10_000)
        self.model: dict[EngineId, set[PrefixHash]] = {}

    @rule(engine=ENGINES, hashes=HASHES)
    def replace(self, engine: EngineId, hashes: tuple[PrefixHash, ...]) -> None:
        self.index.replace(engine, hashes)
        self.model[engine] = set(hashes)

    @rule(engine=ENGINES, removed=HASHES, stored=HASHES, is_cleared=st.booleans())
    def apply(
        self,
        engine: EngineId,
        removed: tuple[PrefixHash, ...],
        stored: tuple[PrefixHash, ...],
        is_cleared: bool,
    ) -> None:
        if engine not in self.model:
            return
        self.index.apply(engine, BlockChanges(removed, stored, is_cleared))
        held = set() if is_cleared else self.model[engine]
        self.model[engine] = (held - set(removed)) | set(stored)

    @rule(engine=ENGINES)
    def remove(self, engine: EngineId) -> None:
        self.index.remove(engine)
        self.model.pop(engine, None)

    @rule(engine=ENGINES, prompt=HASHES)
    def match(self, engine: EngineId, prompt: tuple[PrefixHash, ...]) -> None:
        held = self.model.get(engine, set())
        expected = next((i for i, prefix in enumerate(prompt) if prefix not in held), len(prompt))
        assert self.index.num_matching_blocks(engine, prompt) == expected

    @invariant()
    def counts_agree(self) -> None:
        assert self.index.num_hashes == sum(map(len, self.model.values()))
        for engine, held in self.model.items():
            assert self.index.num_hashes_of(engine) == len(held)


TestIndexAgainstSets = IndexAgainstSets.TestCase
