"""From sequences to blocks: prefix hits, allocation, commits to the prefix cache, freeing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.kv import PrefixHash, PrefixHasher
from libs.kv.block_pool import BlockCounts, BlockPool, PoolChanges
from services.engine.core.request import Sequence
from services.engine.core.sequence_table import SequenceTable, Slots


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached blocks that a sequence can start from. They are not held yet."""

    block_ids: tuple[int, ...]
    num_tokens: int
    num_evictable_blocks: int


NO_HIT = PrefixHit((), 0, 0)


class KVCacheManager:
    """The only caller of the block pool; writes the block tables in the sequence table."""

    def __init__(
        self, table: SequenceTable, *, num_blocks: int, block_size: int, enable_prefix_caching: bool
    ) -> None:
        self.block_size = block_size
        self._table = table
        self._pool = BlockPool(num_blocks)
        self._enable_prefix_caching = enable_prefix_caching

    @property
    def num_blocks(self) -> int:
        """Blocks in total."""
        return self._pool.num_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self._pool.num_available

    @property
    def block_counts(self) -> BlockCounts:
        """Blocks by state."""
        return self._pool.counts

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def find_longest_prefix(self, sequence: Sequence) -> PrefixHit:
        """Look up the sequence's full blocks.

        A hit is capped one token below what is known, rounded down to blocks: at least one token must be
        computed, or there would be no logits to sample from.
        """
        if not self._enable_prefix_caching:
            return NO_HIT
        max_num_tokens = len(sequence.token_ids) - 1
        self._hasher(sequence).extend(sequence.prefix_hashes, sequence.token_ids, len(sequence.token_ids))
        blocks = self._pool.find_longest_prefix(sequence.prefix_hashes[: max_num_tokens // self.block_size])
        return PrefixHit(tuple(blocks), len(blocks) * self.block_size, self._pool.count_evictable(blocks))

    def start(self, slot: int, hit: PrefixHit) -> None:
        """Give a new row the blocks of its hit."""
        self._pool.hold(hit.block_ids)
        count = len(hit.block_ids)
        self._table.block_table[slot, :count] = hit.block_ids
        self._table.num_blocks[slot] = self._table.num_committed_blocks[slot] = count
        self._table.num_computed_tokens[slot] = hit.num_tokens

    def missing_blocks(self, slots: Slots, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return, for each row, how many blocks it lacks to hold ``num_tokens`` tokens."""
        needed = (num_tokens + (self.block_size - 1)) // self.block_size
        missing: npt.NDArray[np.int64] = np.maximum(needed - self._table.num_blocks[slots], 0)
        return missing

    def allocate(self, slots: Slots, num_new_blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Append new blocks to the rows' block tables; returns them, one row after the other.

        The caller has made sure that enough are available.
        """
        block_ids = np.array(self._pool.allocate(int(num_new_blocks.sum())), np.int32)
        rows = np.repeat(slots, num_new_blocks)
        # Position of each new block among those of its row.
        ordinals = np.arange(len(block_ids)) - np.repeat(np.cumsum(num_new_blocks) - num_new_blocks, num_new_blocks)
        self._table.block_table[rows, self._table.num_blocks[rows] + ordinals] = block_ids
        self._table.num_blocks[slots] += num_new_blocks
        return block_ids

    def commit(self, slots: Slots) -> None:
        """Make the rows' newly full blocks findable. Only computed tokens count."""
        table = self._table
        num_full = table.num_computed_tokens[slots] // self.block_size
        for index in np.flatnonzero(num_full > table.num_committed_blocks[slots]).tolist():
            slot, last = int(slots[index]), int(num_full[index])
            if self._enable_prefix_caching:
                self._store(slot, first=int(table.num_committed_blocks[slot]), last=last)
            table.num_committed_blocks[slot] = last

    def free(self, slot: int) -> None:
        """Give back all blocks of a row."""
        self._pool.release(self._table.blocks(slot))
        self._table.num_blocks[slot] = self._table.num_committed_blocks[slot] = 0

    def forget(self, slot: int) -> None:
        """Make all blocks of a row unfindable, those of its hit too: their contents cannot be trusted."""
        self._pool.forget(self._table.blocks(slot))

    def take_changes(self) -> PoolChanges:
        """Return changes of the prefix cache since the last call."""
        return self._pool.take_changes()

    def cached_hashes(self) -> Iterator[tuple[PrefixHash, int]]:
        """Iterate over the prefix cache."""
        return self._pool.cached_hashes()

    def check_integrity(self) -> list[str]:
        """Compare block tables and pool; returns one sentence per fault."""
        holders: dict[int, int] = {}
        faults: list[str] = []
        for slot in self._table.active_slots.tolist():
            blocks = self._table.blocks(slot)
            if len(set(blocks)) != len(blocks):
                faults.append(f"slot {slot} holds a block twice")
            if len(blocks) * self.block_size < self._table.num_computed_tokens[slot]:
                faults.append(f"slot {slot} has computed more tokens than its blocks hold")
            for block in blocks:
                holders[block] = holders.get(block, 0) + 1
        return faults + self._pool.check_integrity(holders)

    def _store(self, slot: int, *, first: int, last: int) -> None:
        sequence = self._table.sequence_at(slot)
        self._hasher(sequence).extend(sequence.prefix_hashes, self._table.token_ids[slot], last * self.block_size)
        for index in range(first, last):
            self._pool.store(int(self._table.block_table[slot, index]), sequence.prefix_hashes[index])

    def _hasher(self, sequence: Sequence) -> PrefixHasher:
        return PrefixHasher(self.block_size, sequence.request.cache_salt)
