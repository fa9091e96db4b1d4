"""From sequences to blocks: hits at block borders, caps, commits, and damage that the integrity check sees."""

from __future__ import annotations

import numpy as np
import pytest

from services.engine.core.block_layout import PagedLayout
from services.engine.core.kv_cache_manager import BlockCopy, KVCacheManager
from services.engine.core.sequence_table import SequenceTable
from tests.fakes.requests import make_sequence

_BLOCK_SIZE = 16


class _Cache:
    """A table and a manager, and sequences that are computed in full at once."""

    def __init__(self, *, num_blocks: int = 16, enable_prefix_caching: bool = True) -> None:
        self.table = SequenceTable(max_num_seqs=4, max_model_len=128, block_size=_BLOCK_SIZE)
        self.manager = KVCacheManager(
            self.table,
            PagedLayout(_BLOCK_SIZE),
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._num_sequences = 0

    def hit(self, token_ids: range | list[int], salt: bytes = b"") -> int:
        """Return how many tokens would come from the cache."""
        self._num_sequences += 1
        sequence = make_sequence(self._num_sequences, token_ids, cache_salt=salt)
        return self.manager.find_longest_prefix(sequence).num_tokens

    def compute(self, token_ids: range | list[int], num_tokens: int | None = None, salt: bytes = b"") -> int:
        """Run the first ``num_tokens`` of a sequence and keep its row; returns the slot."""
        self._num_sequences += 1
        sequence = make_sequence(self._num_sequences, token_ids, cache_salt=salt)
        hit = self.manager.find_longest_prefix(sequence)
        slot = self.table.take(sequence, expected_output_tokens=1)
        self.manager.start(slot, hit)
        self.go_on(slot, len(token_ids) if num_tokens is None else num_tokens)
        return slot

    def go_on(self, slot: int, num_tokens: int) -> None:
        slots, target = np.array([slot]), np.array([num_tokens])
        self.manager.allocate(slots, self.manager.missing_blocks(slots, target))
        self.table.num_computed_tokens[slot] = num_tokens
        self.manager.commit(slots, target)

    def finish(self, slot: int) -> None:
        self.manager.free(slot)
        self.table.give_back(slot)


@pytest.mark.parametrize(
    ("num_tokens", "num_hit_tokens"),
    [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (47, 32), (48, 32), (49, 48)],
)
def test_hit_on_the_same_prompt_leaves_a_token_to_compute(num_tokens: int, num_hit_tokens: int) -> None:
    cache = _Cache()
    cache.finish(cache.compute(range(num_tokens)))

    assert cache.hit(range(num_tokens)) == num_hit_tokens


@pytest.mark.parametrize(
    ("num_tokens", "num_hit_tokens"), [(15, 0), (16, 16), (17, 16), (31, 16), (32, 32), (33, 32)]
)
def test_a_longer_prompt_hits_all_full_blocks(num_tokens: int, num_hit_tokens: int) -> None:
    cache = _Cache()
    cache.finish(cache.compute(range(num_tokens)))

    assert cache.hit(range(num_tokens + 20)) == num_hit_tokens


def test_hit_ends_where_prompts_part() -> None:
    cache = _Cache()
    cache.finish(cache.compute(range(64)))

    assert cache.hit([*range(32), 999, *range(33, 64)]) == 32
    assert cache.hit([999, *range(1, 64)]) == 0


def test_only_computed_blocks_are_found() -> None:
    cache = _Cache()
    slot = cache.compute(range(64), num_tokens=31)
    assert cache.hit(range(64)) == 16

    cache.go_on(slot, 32)

    assert cache.hit(range(64)) == 32


def test_blocks_are_found_while_their_first_owner_runs() -> None:
    cache = _Cache()
    first = cache.compute(range(40))

    second = cache.compute(range(40))

    assert cache.table.blocks(second)[:2] == cache.table.blocks(first)[:2]
    assert cache.table.blocks(second)[2] != cache.table.blocks(first)[2]
    cache.finish(first)
    assert cache.manager.check_integrity() == []


def test_another_salt_finds_nothing() -> None:
    cache = _Cache()
    cache.finish(cache.compute(range(40), salt=b"red"))

    assert cache.hit(range(40), b"blue") == 0
    assert cache.hit(range(40)) == 0
    assert cache.hit(range(40), b"red") == 32


def test_nothing_is_found_when_prefix_caching_is_off() -> None:
    cache = _Cache(enable_prefix_caching=False)
    cache.finish(cache.compute(range(40)))

    assert cache.hit(range(40)) == 0
    assert list(cache.manager.cached_hashes()) == []
    assert cache.manager.block_counts.num_free == 16


def test_old_prefix_misses_after_its_blocks_were_filled_again() -> None:
    cache = _Cache(num_blocks=3)
    cache.finish(cache.compute(range(40)))

    cache.finish(cache.compute(range(500, 548)))

    assert cache.hit(range(40)) == 0
    assert cache.hit(range(500, 548)) == 32


def test_hit_counts_blocks_that_nobody_holds() -> None:
    cache = _Cache()
    cache.finish(cache.compute(range(64)))
    cache.compute(range(32))

    hit = cache.manager.find_longest_prefix(make_sequence(99, range(64)))

    assert len(hit.block_ids) == 3
    assert hit.num_evictable_blocks == 2


def test_a_cached_prefix_is_held_while_used() -> None:
    cache = _Cache(num_blocks=5)
    cache.finish(cache.compute(range(48)))
    user = cache.compute(range(40))

    cache.compute(range(500, 532))

    assert cache.hit(range(40)) == 32
    assert cache.manager.num_available_blocks == 0
    cache.finish(user)
    assert cache.manager.check_integrity() == []


def test_new_blocks_of_several_rows_are_given_row_by_row() -> None:
    cache = _Cache()
    slots = np.array([cache.compute(range(first, first + 20)) for first in (0, 100)])

    block_ids = cache.manager.allocate(slots, np.array([2, 1]))

    assert cache.table.blocks(int(slots[0]))[2:] == block_ids[:2].tolist()
    assert cache.table.blocks(int(slots[1]))[2:] == block_ids[2:].tolist()


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_shared"), [(1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (40, 2)]
)
def test_a_fork_shares_all_blocks_but_that_of_the_last_prompt_token(
    num_prompt_tokens: int, num_shared: int
) -> None:
    cache = _Cache()
    parent = cache.compute(range(60), num_tokens=num_prompt_tokens)
    blocks = cache.table.blocks(parent)

    hit = cache.manager.fork_of(parent, num_prompt_tokens)
    child = cache.table.take(make_sequence(50, range(num_prompt_tokens)), expected_output_tokens=1)
    copy = cache.manager.start(child, hit)

    assert hit.num_tokens == num_prompt_tokens - 1
    target = cache.table.blocks(child)[-1]
    assert copy == BlockCopy(blocks[num_shared], target)
    assert target not in blocks
    assert cache.table.blocks(child) == [*blocks[:num_shared], target]
    assert cache.manager.reference_counts(child) == [2] * num_shared + [1]
    assert cache.manager.check_integrity() == []


def test_a_fork_outlives_its_parent() -> None:
    cache = _Cache(num_blocks=4)
    parent = cache.compute(range(40))
    child = cache.table.take(make_sequence(50, range(40)), expected_output_tokens=1)
    cache.manager.start(child, cache.manager.fork_of(parent, 40))

    cache.finish(parent)

    assert cache.manager.reference_counts(child) == [1, 1, 1]
    assert cache.manager.num_available_blocks == 1
    assert cache.manager.check_integrity() == []


def test_steps_that_were_sent_since_commit_nothing() -> None:
    cache = _Cache()
    slot = cache.compute(range(64), num_tokens=0)
    slots = np.array([slot])
    cache.manager.allocate(slots, np.array([4]))
    cache.table.num_computed_tokens[slot] = 64

    committed = cache.manager.commit(slots, np.array([33]))

    assert [len(hashes) for hashes in committed.values()] == [2]
    assert cache.hit(range(64)) == 32


def test_commits_are_told_once_by_handle() -> None:
    cache = _Cache()
    slot = cache.compute(range(64), num_tokens=20)
    handle = int(cache.table.handles[slot])
    slots = np.array([slot])
    cache.manager.allocate(slots, np.array([2]))

    first = cache.manager.commit(slots, np.array([50]))
    second = cache.manager.commit(slots, np.array([63]))

    assert {key: len(hashes) for key, hashes in first.items()} == {handle: 2}
    assert second == {}


def _damage(cache: _Cache, slot: int, kind: str) -> None:
    if kind == "a block twice in one row":
        cache.table.block_table[slot, 2] = cache.table.block_table[slot, 1]
    elif kind == "a foreign block":
        cache.table.block_table[slot, 2] = 9
    elif kind == "a lost block":
        cache.table.num_blocks[slot] = 2
    else:
        cache.table.num_computed_tokens[slot] = 49


_DAMAGES = {
    "a block twice in one row": "holds a block twice",
    "a foreign block": "holders counted",
    "a lost block": "holders counted",
    "too much computed": "computed more tokens than its blocks hold",
}


@pytest.mark.parametrize("kind", _DAMAGES)
def test_integrity_check_names_a_damaged_block_table(kind: str) -> None:
    cache = _Cache()
    slot = cache.compute(range(40))
    assert cache.manager.check_integrity() == []

    _damage(cache, slot, kind)

    assert any(_DAMAGES[kind] in fault for fault in cache.manager.check_integrity())


@pytest.mark.parametrize("kind", _DAMAGES)
def test_repair_leaves_a_pool_that_agrees_with_the_block_tables(kind: str) -> None:
    cache = _Cache()
    slot = cache.compute(range(40))
    _damage(cache, slot, kind)

    cache.manager.repair()

    # What is wrong with the row itself goes when its sequence leaves it.
    assert all(fault.startswith(f"slot {slot} ") for fault in cache.manager.check_integrity())
    cache.finish(slot)
    assert cache.manager.check_integrity() == []
    assert cache.manager.num_available_blocks == 16
