"""Sequence table and KV cache manager over a fake KV memory: a hit must find exactly what its prefix left there.

SKV-06 of the known faults.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.kv import prefix_hashes
from services.engine.core.block_layout import BlockLayout, ContiguousLayout, PagedLayout
from services.engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from services.engine.core.request import Sequence
from services.engine.core.sequence_table import SequenceTable
from tests.fakes.requests import make_sequence
from tests.model.budgets import machine_settings

_BLOCK_SIZE = 4
_MAX_MODEL_LEN = 40
_MAX_NUM_SEQS = 5
# So that a few fit into the small pools.
_CONTIGUOUS_LEN = 12

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
        num_blocks=st.sampled_from((20, 12, 8)),
        enable_prefix_caching=st.sampled_from((True, True, True, False)),
        layout=st.sampled_from((*[PagedLayout(_BLOCK_SIZE)] * 3, ContiguousLayout(_BLOCK_SIZE, _CONTIGUOUS_LEN))),
    )
    def begin(self, num_blocks: int, enable_prefix_caching: bool, layout: BlockLayout) -> None:
        self.table = SequenceTable(max_num_seqs=_MAX_NUM_SEQS, max_model_len=_MAX_MODEL_LEN, block_size=_BLOCK_SIZE)
        self.manager = KVCacheManager(
            self.table,
            layout,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.enable_prefix_caching = enable_prefix_caching
        self.max_num_tokens = _CONTIGUOUS_LEN if isinstance(layout, ContiguousLayout) else _MAX_MODEL_LEN
        self.memory = np.zeros(num_blocks * _BLOCK_SIZE, np.int64)
        self.num_sequences = 0
        # Sequences that have been here, to come again.
        self.past: list[tuple[bytes, list[int]]] = []

    @rule(salt=_salts, token_ids=_tokens)
    def start(self, salt: bytes, token_ids: list[int]) -> None:
        sequence = self._sequence(salt, token_ids[: self.max_num_tokens])
        self._start(sequence, self.manager.find_longest_prefix(sequence))

    @precondition(lambda self: self._forkable())
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Start a sequence with the prompt of another: whole blocks are shared, the last one is copied."""
        parent = data.draw(st.sampled_from(self._forkable()))
        num_prompt = self.table.sequence_at(parent).num_prompt_tokens
        prompt = self.table.known_token_ids(parent)[:num_prompt].tolist()
        sequence = self._sequence(self.table.sequence_at(parent).request.cache_salt, prompt)
        hit = self.manager.fork_of(parent, num_prompt)

        assert hit.num_tokens == num_prompt - 1
        assert len(hit.block_ids) == (num_prompt - 1) // _BLOCK_SIZE
        self._start(sequence, hit)

    def _forkable(self) -> list[int]:
        table = self.table
        return [
            slot
            for slot in table.active_slots.tolist()
            if table.num_computed_tokens[slot] >= table.sequence_at(slot).num_prompt_tokens
        ]

    def _start(self, sequence: Sequence, hit: PrefixHit) -> None:
        needed = self.manager.num_blocks_for(len(sequence.token_ids)) - len(hit.block_ids)
        is_full = needed > self.manager.num_available_blocks - hit.num_evictable_blocks
        if not self.table.has_free_slot or is_full:
            return
        slot = self.table.take(sequence, expected_output_tokens=1)

        copy = self.manager.start(slot, hit)

        blocks = list(hit.block_ids)
        assert (copy is None) == (hit.copied_block_id is None)
        if copy is not None:
            assert copy.source_block_id == hit.copied_block_id
            blocks.append(copy.target_block_id)
            source, target = (self._places([block], 0, _BLOCK_SIZE) for block in (copy.source_block_id, blocks[-1]))
            self.memory[target] = self.memory[source]
        assert self.table.blocks(slot) == blocks
        assert self.table.num_computed_tokens[slot] == hit.num_tokens
        assert self.manager.reference_counts(slot) == [self._num_holders(block) for block in blocks]

    def _num_holders(self, block: int) -> int:
        return sum(block in self.table.blocks(slot) for slot in self.table.active_slots.tolist())

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
        token_ids = token_ids[: self.max_num_tokens - first]
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

    @rule()
    def repair_what_is_sound(self) -> None:
        """Repairing what is sound loses nothing that can be found."""
        cached = dict(self.manager.cached_hashes())

        self.manager.repair()

        assert dict(self.manager.cached_hashes()) == cached

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
        before = self.table.num_committed_blocks[slots]

        committed = self.manager.commit(slots, self.table.num_computed_tokens[slots])

        for slot, index in zip(slots.tolist(), before.tolist(), strict=True):
            sequence = self.table.sequence_at(slot)
            last = int(self.table.num_computed_tokens[slot]) // _BLOCK_SIZE
            token_ids = self.table.known_token_ids(slot)[: last * _BLOCK_SIZE]
            hashes = prefix_hashes(token_ids, _BLOCK_SIZE, sequence.request.cache_salt)[index:]
            assert committed.get(sequence.handle, []) == (hashes if self.enable_prefix_caching else [])

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
