"""Sequence table and KV cache manager over a fake KV memory: a hit must find exactly what its prefix left there."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.kv import prefix_hashes
from services.engine.core.kv_cache_manager import KVCacheManager
from services.engine.core.request import Sequence
from services.engine.core.sequence_table import SequenceTable
from tests.fakes.requests import make_sequence
from tests.model.budgets import machine_settings

_BLOCK_SIZE = 4
_MAX_MODEL_LEN = 40
_MAX_NUM_SEQS = 5

_salts = st.sampled_from((b"", b"", b"tenant", b"other"))
# Two token ids only, so that prefixes meet often.
_tokens = st.lists(st.sampled_from((1, 1, 1, 2)), min_size=1, max_size=30)


def _contents(salt: bytes, token_ids: list[int]) -> list[int]:
    """Return what computing a sequence leaves at each position: a digest of salt and prefix."""
    return list(
        accumulate(token_ids, lambda digest, token_id: hash((digest, token_id)), initial=int.from_bytes(salt))
    )[1:]


class KVCacheManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from((20, 12, 8)), enable_prefix_caching=st.sampled_from((True, True, True, False))
    )
    def begin(self, num_blocks: int, enable_prefix_caching: bool) -> None:
        self.table = SequenceTable(max_num_seqs=_MAX_NUM_SEQS, max_model_len=_MAX_MODEL_LEN, block_size=_BLOCK_SIZE)
        self.manager = KVCacheManager(
            self.table,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.enable_prefix_caching = enable_prefix_caching
        self.memory = np.zeros(num_blocks * _BLOCK_SIZE, np.int64)
        self.num_sequences = 0
        # Sequences that have been here, to come again.
        self.past: list[tuple[bytes, list[int]]] = []

    @rule(salt=_salts, token_ids=_tokens)
    def start(self, salt: bytes, token_ids: list[int]) -> None:
        if not self.table.has_free_slot:
            return
        sequence = self._sequence(salt, token_ids)
        hit = self.manager.find_longest_prefix(sequence)
        needed = self.manager.num_blocks_for(len(token_ids)) - len(hit.block_ids)
        if needed > self.manager.num_available_blocks - hit.num_evictable_blocks:
            return
        slot = self.table.take(sequence)

        self.manager.start(slot, hit)

        assert self.table.blocks(slot) == list(hit.block_ids)
        assert self.table.num_computed_tokens[slot] == hit.num_tokens

    @precondition(lambda self: self.past)
    @rule(data=st.data(), continuation=st.lists(st.sampled_from((1, 2)), max_size=6))
    def start_again(self, data: st.DataObject, continuation: list[int]) -> None:
        salt, token_ids = data.draw(st.sampled_from(self.past))
        self.start(salt, (token_ids + continuation)[:_MAX_MODEL_LEN])

    @precondition(lambda self: self.table.num_active)
    @rule(data=st.data(), num_steps=st.integers(1, 3))
    def compute(self, data: st.DataObject, num_steps: int) -> None:
        for _ in range(num_steps):
            slots = np.array(
                sorted(data.draw(st.sets(st.sampled_from(self.table.active_slots.tolist()), min_size=1))), np.int64
            )
            self._compute(slots, np.array([data.draw(st.integers(1, 9)) for _ in slots], np.int64))

    @precondition(lambda self: self.table.num_active)
    @rule()
    def compute_everything(self) -> None:
        slots = self.table.active_slots
        self._compute(slots, np.full(len(slots), _MAX_MODEL_LEN, np.int64))

    @precondition(lambda self: self.table.num_active)
    @rule(data=st.data(), token_ids=st.lists(st.sampled_from((1, 2)), min_size=1, max_size=5))
    def learn_tokens(self, data: st.DataObject, token_ids: list[int]) -> None:
        slot = data.draw(st.sampled_from(self.table.active_slots.tolist()))
        first = int(self.table.num_tokens[slot])
        token_ids = token_ids[: _MAX_MODEL_LEN - first]
        self.table.token_ids[slot, first : first + len(token_ids)] = token_ids
        self.table.num_tokens[slot] += len(token_ids)

    @precondition(lambda self: self.table.num_active)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.table.active_slots.tolist()))
        sequence = self.table.sequence_at(slot)
        self.manager.free(slot)
        self.table.give_back(slot)
        self.past.append((sequence.request.cache_salt, sequence.token_ids.tolist()))

    @precondition(lambda self: self.past)
    @rule(data=st.data(), other_salt=_salts)
    def look_up_what_was_here(self, data: st.DataObject, other_salt: bytes) -> None:
        salt, token_ids = data.draw(st.sampled_from(self.past))
        for probe in (
            token_ids,
            token_ids[:-1] or token_ids,
            [*token_ids, 2][:_MAX_MODEL_LEN],
            [2, *token_ids[1:]],
        ):
            self._check_hit(salt, probe)
            self._check_hit(other_salt, probe)

    @rule(salt=_salts, token_ids=_tokens)
    def look_up_anything(self, salt: bytes, token_ids: list[int]) -> None:
        self._check_hit(salt, token_ids)

    @invariant()
    def computed_tokens_are_where_the_block_table_says(self) -> None:
        for slot in self.table.active_slots.tolist():
            salt = self.table.sequence_at(slot).request.cache_salt
            count = int(self.table.num_computed_tokens[slot])
            expected = _contents(salt, self.table.known_token_ids(slot).tolist())[:count]
            assert self.memory[self._places(self.table.blocks(slot), 0, count)].tolist() == expected

    @invariant()
    def blocks_add_up(self) -> None:
        assert self.manager.check_integrity() == []
        counts = self.manager.block_counts
        assert counts.num_free + counts.num_evictable + counts.num_held == self.manager.num_blocks
        held = {block for slot in self.table.active_slots.tolist() for block in self.table.blocks(slot)}
        assert counts.num_held == len(held)
        assert self.enable_prefix_caching or counts.num_evictable == 0

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for slot in self.table.active_slots.tolist():
            self.manager.free(slot)
            self.table.give_back(slot)
        assert self.manager.block_counts.num_held == 0
        assert self.manager.check_integrity() == []

    def _sequence(self, salt: bytes, token_ids: list[int]) -> Sequence:
        self.num_sequences += 1
        return make_sequence(self.num_sequences, token_ids, cache_salt=salt)

    def _compute(self, slots: np.typing.NDArray[np.int64], at_most: np.typing.NDArray[np.int64]) -> None:
        """Compute like a step does: allocate, write the memory, count, commit; as many rows as blocks allow."""
        counts = np.minimum(at_most, self.table.num_tokens[slots] - self.table.num_computed_tokens[slots])
        missing = self.manager.missing_blocks(slots, self.table.num_computed_tokens[slots] + counts)
        fitting = np.cumsum(missing) <= self.manager.num_available_blocks
        slots, counts, missing = slots[fitting], counts[fitting], missing[fitting]

        new_block_ids = self.manager.allocate(slots, missing)

        tails = [
            self.table.blocks(slot)[-count:] for slot, count in zip(slots, missing.tolist(), strict=True) if count
        ]
        assert [block for tail in tails for block in tail] == new_block_ids.tolist()
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            first = int(self.table.num_computed_tokens[slot])
            contents = _contents(
                self.table.sequence_at(slot).request.cache_salt, self.table.known_token_ids(slot).tolist()
            )
            places = self._places(self.table.blocks(slot), first, first + count)
            self.memory[places] = contents[first : first + count]
        self.table.num_computed_tokens[slots] += counts
        self.manager.commit(slots)

    def _check_hit(self, salt: bytes, token_ids: list[int]) -> None:
        hit = self.manager.find_longest_prefix(self._sequence(salt, token_ids))

        assert hit.num_tokens == len(hit.block_ids) * _BLOCK_SIZE < len(token_ids)
        found = self.memory[self._places(list(hit.block_ids), 0, hit.num_tokens)].tolist()
        assert found == _contents(salt, token_ids)[: hit.num_tokens]
        held = {block for slot in self.table.active_slots.tolist() for block in self.table.blocks(slot)}
        assert hit.num_evictable_blocks == len(set(hit.block_ids) - held)
        # The next block is not in the cache, or the hit is at its cap.
        following = prefix_hashes(token_ids[:-1], _BLOCK_SIZE, salt)[len(hit.block_ids) :]
        assert not following or following[0] not in dict(self.manager.cached_hashes())

    def _places(self, blocks: list[int], first: int, last: int) -> np.typing.NDArray[np.int64]:
        positions = np.arange(first, last)
        return np.array(blocks, np.int64)[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE


TestKVCacheManagerMachine = KVCacheManagerMachine.TestCase
TestKVCacheManagerMachine.settings = machine_settings(max_examples=160, step_count=30)
