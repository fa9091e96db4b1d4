"""Block pool: what each operation promises, and that the integrity check sees damage of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from libs.kv import PrefixHash
from libs.kv.block_pool import BlockPool, PoolExhausted
from tests.fakes.naive_block_pool import NaiveBlockPool


def _hash(number: int) -> PrefixHash:
    return PrefixHash(number.to_bytes(32, "little"))


def _cached(pool: BlockPool, count: int, first: int = 0) -> list[int]:
    """Allocate blocks and give them hashes ``first``, ``first + 1`` …"""
    blocks = pool.allocate(count)
    for index, block in enumerate(blocks):
        assert pool.store(block, _hash(first + index))
    return blocks


def test_refuses_a_pool_without_blocks() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_hands_out_ascending_ids_when_new() -> None:
    assert BlockPool(5).allocate(5) == [0, 1, 2, 3, 4]


def test_takes_nothing_when_too_few_are_available() -> None:
    pool = BlockPool(4)
    pool.allocate(2)

    with pytest.raises(PoolExhausted, match="3 blocks wanted, 2 available"):
        pool.allocate(3)

    assert pool.num_available == 2
    assert pool.allocate(2) == [2, 3]


def test_allocates_no_blocks_without_change() -> None:
    pool = BlockPool(2)
    pool.release(_cached(pool, 2))

    assert pool.allocate(0) == []
    assert pool.find_longest_prefix([_hash(0), _hash(1)]) == [0, 1]


def test_hands_out_free_blocks_before_evicting() -> None:
    pool = BlockPool(4)
    cached, plain = _cached(pool, 2), pool.allocate(2)
    pool.release(cached)
    pool.release(plain)

    assert set(pool.allocate(2)) == set(plain)
    assert pool.find_longest_prefix([_hash(0), _hash(1)]) == cached


def test_evicts_tail_before_head_of_one_sequence() -> None:
    pool = BlockPool(4)
    blocks = _cached(pool, 4)
    pool.release(blocks)

    assert pool.allocate(3) == [blocks[3], blocks[2], blocks[1]]
    assert pool.find_longest_prefix([_hash(n) for n in range(4)]) == blocks[:1]


def test_evicts_least_recently_used_first() -> None:
    pool = BlockPool(2)
    (old,), (young,) = _cached(pool, 1, first=0), _cached(pool, 1, first=1)
    pool.release([old])
    pool.release([young])
    pool.hold([old])
    pool.release([old])

    assert pool.allocate(1) == [young]


def test_a_look_up_alone_does_not_refresh() -> None:
    pool = BlockPool(2)
    (old,), (young,) = _cached(pool, 1, first=0), _cached(pool, 1, first=1)
    pool.release([old])
    pool.release([young])

    pool.find_longest_prefix([_hash(0)])

    assert pool.allocate(1) == [old]


def test_never_evicts_what_is_held() -> None:
    pool = BlockPool(3)
    blocks = _cached(pool, 3)
    pool.hold(blocks[:1])
    pool.release(blocks)

    assert set(pool.allocate(2)) == set(blocks[1:])
    assert pool.num_available == 0
    assert pool.find_longest_prefix([_hash(0)]) == blocks[:1]


def test_evicted_hash_misses_after_its_block_was_filled_again() -> None:
    """SKV-09 of the known faults."""
    pool = BlockPool(1)
    pool.release(_cached(pool, 1, first=0))

    pool.release(_cached(pool, 1, first=1))

    assert pool.find_longest_prefix([_hash(0)]) == []
    assert pool.find_longest_prefix([_hash(1)]) == [0]


def test_second_block_of_the_same_prefix_stays_unhashed() -> None:
    pool = BlockPool(2)
    (first,) = _cached(pool, 1)
    (second,) = pool.allocate(1)

    assert not pool.store(second, _hash(0))

    pool.release([second])
    assert pool.counts.num_free == 1
    assert pool.find_longest_prefix([_hash(0)]) == [first]


def test_prefix_ends_at_the_first_miss() -> None:
    pool = BlockPool(3)
    blocks = _cached(pool, 3)

    assert pool.find_longest_prefix([_hash(0), _hash(7), _hash(2)]) == blocks[:1]


def test_release_without_holder_is_our_own_mistake() -> None:
    pool = BlockPool(2)

    with pytest.raises(AssertionError, match="released without a holder"):
        pool.release([0])


@pytest.mark.parametrize("state", ["free", "cached"])
def test_store_needs_a_held_block_without_hash(state: str) -> None:
    pool = BlockPool(2)
    if state == "cached":
        _cached(pool, 1)

    with pytest.raises(AssertionError, match="block 0 is cached"):
        pool.store(0, _hash(5))


def test_hold_of_a_free_block_is_our_own_mistake() -> None:
    pool = BlockPool(2)

    with pytest.raises(AssertionError):
        pool.hold([0])


def test_changes_leave_out_what_came_and_went() -> None:
    pool = BlockPool(1)
    pool.release(_cached(pool, 1, first=0))
    pool.release(_cached(pool, 1, first=1))

    changes = pool.take_changes()

    assert changes.removed == ()
    assert changes.stored == ((_hash(1), 0),)


def test_changes_name_a_prefix_that_moved_in_both_lists() -> None:
    pool = BlockPool(2)
    pool.release(_cached(pool, 1))
    pool.take_changes()
    pool.allocate(2)
    pool.store(1, _hash(0))

    changes = pool.take_changes()

    assert changes.removed == (_hash(0),)
    assert changes.stored == ((_hash(0), 1),)


def test_same_victims_as_an_ordered_dictionary_over_ten_thousand_operations() -> None:
    """SKV-09 of the known faults."""
    draw = random.Random(9)
    pool, naive = BlockPool(24), NaiveBlockPool(24)
    tables: list[list[int]] = []
    num_evictions = 0
    for _ in range(10_000):
        if tables and draw.random() < 0.5:
            blocks = tables.pop(draw.randrange(len(tables)))
            pool.release(blocks)
            naive.release(blocks)
            continue
        chain = [_hash(draw.randrange(60)) for _ in range(draw.randrange(1, 4))]
        hit = pool.find_longest_prefix(chain)
        assert hit == naive.find_longest_prefix(chain)
        pool.hold(hit)
        naive.hold(hit)
        count = min(len(chain) - len(hit), naive.num_available)
        victims = naive.choose_victims(count)
        evicted = [naive.hash_of[block] for block in victims]
        blocks = pool.allocate(count)
        assert blocks[count - len(victims) :] == victims
        assert all(pool.find_longest_prefix([gone]) == [] for gone in evicted)
        num_evictions += len(victims)
        naive.take(blocks)
        for block, prefix_hash in zip(blocks, chain[len(hit) :], strict=False):
            assert pool.store(block, prefix_hash) == naive.store(block, prefix_hash)
        tables.append(hit + blocks)
        assert dict(pool.cached_hashes()) == naive.block_of
    assert num_evictions > 1_000


# ---- damage ----


def _held_evictable_and_free() -> tuple[BlockPool, dict[int, int]]:
    """Blocks 0 and 1 are held and hashed, 2 and 3 evictable, 4 and 5 free."""
    pool = BlockPool(6)
    _cached(pool, 2, first=0)
    pool.release(_cached(pool, 2, first=2))
    return pool, {0: 1, 1: 1}


def _set(name: str, value: object) -> Callable[[BlockPool], None]:
    return lambda pool: setattr(pool, name, value)


def _set_item(name: str, key: object, value: object) -> Callable[[BlockPool], None]:
    return lambda pool: getattr(pool, name).__setitem__(key, value)


def _hash_like(pool: BlockPool, block: int, other: int) -> None:
    """Give ``block`` the hash of ``other`` and forget its own."""
    pool._block_of.pop(_hash(block))
    pool._hashes[block] = _hash(other)


def test_an_undamaged_pool_has_no_faults() -> None:
    pool, holders = _held_evictable_and_free()

    assert pool.check_integrity(holders) == []


_DAMAGES = [
    pytest.param(_set_item("_ref_counts", 0, 2), "block 0 has 2 holders counted and 1", id="one holder too many"),
    pytest.param(_set_item("_ref_counts", 0, 0), "block 0 has 0 holders counted and 1", id="a lost holder"),
    pytest.param(_set_item("_ref_counts", 5, -1), "block 5 has -1 holders counted and 0", id="a negative count"),
    pytest.param(_set("_num_unheld", 3), "3 blocks counted without holder, 4 found", id="a wrong unheld count"),
    pytest.param(_set("_num_evictable", 1), "1 evictable blocks counted, 2 found", id="a wrong evictable count"),
    pytest.param(_set_item("_hashes", 0, None), "hash map", id="a block that lost its hash"),
    pytest.param(_set_item("_hashes", 0, _hash(9)), "hash map", id="a block with another hash"),
    pytest.param(_set_item("_block_of", _hash(9), 5), "hash map", id="a hash without its block"),
    pytest.param(lambda pool: pool._block_of.pop(_hash(0)), "hash map", id="a hash that is not found"),
    pytest.param(lambda pool: _hash_like(pool, 0, 1), "hash map", id="two blocks with one hash"),
    pytest.param(_set_item("_next", 4, 2), "free queue", id="a queue that skips a block"),
    pytest.param(_set_item("_next", 5, 4), "twice", id="a queue that goes in a circle"),
    pytest.param(_set_item("_next", 4, 0), "free queue", id="a queue that holds a held block"),
    pytest.param(_set_item("_next", 4, 99), "free queue", id="a queue that leaves the pool"),
    pytest.param(_set_item("_previous", 2, 0), "free queue", id="a queue that differs backwards"),
    pytest.param(_set("_head", 4), "free queue", id="a wrong head"),
    pytest.param(_set("_tail", 5), "free queue", id="a wrong tail"),
    pytest.param(_set_item("_stored", _hash(9), 5), "changes", id="a stored change that is not cached"),
    pytest.param(_set_item("_stored", _hash(0), 5), "changes", id="a stored change with another block"),
    pytest.param(_set_item("_removed", _hash(2), None), "changes", id="a removed change that is cached"),
]


@pytest.mark.parametrize(("damage", "sentence"), _DAMAGES)
def test_integrity_check_names_the_damage(damage: Callable[[BlockPool], None], sentence: str) -> None:
    pool, holders = _held_evictable_and_free()
    pool.take_changes()

    damage(pool)

    assert any(sentence in fault for fault in pool.check_integrity(holders))


@pytest.mark.parametrize("damage", [pytest.param(case.values[0], id=case.id) for case in _DAMAGES])
def test_rebuild_repairs_the_damage(damage: Callable[[BlockPool], None]) -> None:
    pool, holders = _held_evictable_and_free()
    followed = {value for value, _ in pool.take_changes().stored}
    damage(pool)

    pool.rebuild(holders)

    assert pool.check_integrity(holders) == []
    assert [pool.ref_count(block) for block in range(6)] == [1, 1, 0, 0, 0, 0]
    # What is found is what was there: contents never come under another hash.
    cached = dict(pool.cached_hashes())
    assert cached.items() <= {_hash(block): block for block in range(4)}.items()
    # Who follows the changes believes in nothing that is gone, as far as the damage left a trace of it.
    changes = pool.take_changes()
    followed = (followed - {*changes.removed}) | {value for value, _ in changes.stored}
    assert cached.keys() <= followed
    pool.release([0, 1])
    assert sorted(pool.allocate(6)) == list(range(6))
    assert dict(pool.cached_hashes()) == {}
    assert pool.check_integrity(dict.fromkeys(range(6), 1)) == []


def test_rebuild_of_a_sound_pool_keeps_the_order_of_eviction() -> None:
    pool, holders = _held_evictable_and_free()

    pool.rebuild(holders)

    assert pool.allocate(4) == [4, 5, 3, 2]


def test_rebuild_frees_what_was_lost_and_forgets_its_contents() -> None:
    pool, _ = _held_evictable_and_free()
    pool.take_changes()

    pool.rebuild({0: 1})

    assert pool.check_integrity({0: 1}) == []
    assert dict(pool.cached_hashes()) == {_hash(0): 0, _hash(2): 2, _hash(3): 3}
    assert pool.take_changes().removed == (_hash(1),)


def test_rebuild_counts_every_holder_of_a_block_that_was_handed_out_twice() -> None:
    pool, _ = _held_evictable_and_free()

    pool.rebuild({0: 2, 1: 1, 4: 2})

    assert [pool.ref_count(block) for block in (0, 1, 4)] == [2, 1, 2]
    assert pool.num_available == 3
    pool.release([0, 1, 4])
    assert pool.check_integrity({0: 1, 4: 1}) == []


def test_rebuild_tells_only_what_is_not_told_yet() -> None:
    pool = BlockPool(3)
    blocks = _cached(pool, 2)
    pool.take_changes()
    pool.store(pool.allocate(1)[0], _hash(5))

    pool.rebuild(dict.fromkeys((*blocks, 2), 1))

    changes = pool.take_changes()
    assert (changes.removed, changes.stored) == ((), ((_hash(5), 2),))


@pytest.mark.parametrize("block", [-1, 6])
def test_integrity_check_names_a_block_table_with_a_block_outside_the_pool(block: int) -> None:
    pool, holders = _held_evictable_and_free()

    assert any(f"block {block} " in fault for fault in pool.check_integrity({**holders, block: 1}))
