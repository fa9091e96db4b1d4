"""The block pool against plain dictionaries, and against a listener that follows its changes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.kv import PrefixHash
from libs.kv.block_pool import BlockPool, PoolExhausted
from tests.fakes.naive_block_pool import NaiveBlockPool
from tests.model.budgets import machine_settings

# Few hashes, so that they come, go and come again.
_HASHES = tuple(PrefixHash(bytes([number]) * 32) for number in range(10))


class BlockPoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.sampled_from((8, 5, 2, 1)))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.naive = NaiveBlockPool(num_blocks)
        # Block tables as sequences would hold them.
        self.tables: list[list[int]] = []
        # Prefixes as somebody believes them who applies the changes.
        self.followed: dict[PrefixHash, int] = {}

    @rule(num_blocks=st.integers(0, 4))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > self.naive.num_available:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(num_blocks)
            return
        victims = self.naive.choose_victims(num_blocks)

        blocks = self.pool.allocate(num_blocks)

        num_from_free = num_blocks - len(victims)
        assert len(set(blocks)) == num_blocks
        assert set(blocks[:num_from_free]) <= self.naive.free
        assert blocks[num_from_free:] == victims
        self.naive.take(blocks)
        self.tables.append(blocks)

    @rule(chain=st.lists(st.sampled_from(_HASHES), max_size=6, unique=True), is_held=st.booleans())
    def find_longest_prefix(self, chain: list[PrefixHash], is_held: bool) -> None:
        blocks = self.pool.find_longest_prefix(chain)

        assert blocks == self.naive.find_longest_prefix(chain)
        assert self.pool.count_evictable(blocks) == sum(block in self.naive.evictable for block in blocks)
        if is_held:
            self.pool.hold(blocks)
            self.naive.hold(blocks)
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))

        self.pool.release(blocks)

        self.naive.release(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.tables))

        self.pool.forget(blocks)

        self.naive.forget(blocks)

    @precondition(lambda self: self._storable())
    @rule(data=st.data(), prefix_hash=st.sampled_from(_HASHES))
    def store(self, data: st.DataObject, prefix_hash: PrefixHash) -> None:
        block = data.draw(st.sampled_from(self._storable()))

        assert self.pool.store(block, prefix_hash) == self.naive.store(block, prefix_hash)

    @precondition(lambda self: self._storable())
    @rule(hashes=st.permutations(_HASHES))
    def store_all(self, hashes: list[PrefixHash]) -> None:
        for block, prefix_hash in zip(self._storable(), hashes, strict=False):
            assert self.pool.store(block, prefix_hash) == self.naive.store(block, prefix_hash)

    @rule()
    def rebuild_what_is_sound(self) -> None:
        """Repairing a sound pool changes nothing: not the order of eviction, and not what is to be told."""
        self.pool.rebuild(dict(self.naive.held))

    @rule()
    def take_changes(self) -> None:
        changes = self.pool.take_changes()

        assert len(set(changes.removed)) == len(changes.removed)
        for prefix_hash in changes.removed:
            del self.followed[prefix_hash]
        for prefix_hash, block in changes.stored:
            assert prefix_hash not in self.followed
            self.followed[prefix_hash] = block
        assert self.followed == self.naive.block_of
        nothing = self.pool.take_changes()
        assert (nothing.removed, nothing.stored) == ((), ())

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        counts = self.pool.counts
        assert counts.num_free == len(self.naive.free)
        assert counts.num_evictable == len(self.naive.evictable)
        assert counts.num_held == len(self.naive.held)
        assert counts.num_free + counts.num_evictable + counts.num_held == self.pool.num_blocks
        assert self.pool.num_available == self.naive.num_available

    @invariant()
    def every_holder_is_counted(self) -> None:
        holders: dict[int, int] = {}
        for blocks in self.tables:
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        assert holders == self.naive.held
        assert [self.pool.ref_count(b) for b in range(self.pool.num_blocks)] == [
            holders.get(b, 0) for b in range(self.pool.num_blocks)
        ]
        assert self.pool.check_integrity(holders) == []

    @invariant()
    def what_is_cached_is_found_and_nothing_else(self) -> None:
        block_of = self.naive.block_of
        assert dict(self.pool.cached_hashes()) == block_of
        for prefix_hash in _HASHES:
            found = [block_of[prefix_hash]] if prefix_hash in block_of else []
            assert self.pool.find_longest_prefix([prefix_hash]) == found

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for blocks in self.tables:
            self.pool.release(blocks)
        assert sorted(self.pool.allocate(self.pool.num_blocks)) == list(range(self.pool.num_blocks))
        assert dict(self.pool.cached_hashes()) == {}

    def _storable(self) -> list[int]:
        return [block for block in self.naive.held if block not in self.naive.hash_of]


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = machine_settings(max_examples=200, step_count=40)
