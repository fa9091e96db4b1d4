"""From sequences to blocks: prefix hits, allocation, commits to the prefix cache, freeing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.kv import PrefixHash, PrefixHasher
from libs.kv.block_pool import BlockCounts, BlockPool, PoolChanges
from services.engine.core.block_layout import BlockLayout
from services.engine.core.recent_hashes import RecentHashes
from services.engine.core.request import Sequence
from services.engine.core.sequence_table import SequenceTable, Slots
from services.engine.core.timings import CacheMissReason


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The blocks that a sequence can start from. They are not held yet.

    ``copied_block_id`` is a block of a sibling's that is to be copied before it can be written: it holds the tokens
    after ``block_ids``.
    """

    block_ids: tuple[int, ...]
    num_tokens: int
    num_evictable_blocks: int
    copied_block_id: int | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Contents to be copied from one block to another before a step computes."""

    source_block_id: int
    target_block_id: int


NO_HIT = PrefixHit((), 0, 0)

# Evicted hashes that are remembered, only to tell why a prompt was not cached: about 10 MB.
_MAX_REMEMBERED_HASHES = 65_536


class KVCacheManager:
    """The only caller of the block pool; writes the block tables in the sequence table."""

    def __init__(
        self,
        table: SequenceTable,
        layout: BlockLayout,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
    ) -> None:
        self.block_size = block_size
        self._layout = layout
        self._table = table
        self._pool = BlockPool(num_blocks)
        self._enable_prefix_caching = enable_prefix_caching
        self._evicted = RecentHashes(_MAX_REMEMBERED_HASHES)

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
        """Return the blocks that a sequence of this many tokens holds."""
        return int(self._layout.blocks_for(np.array([num_tokens]))[0])

    def find_longest_prefix(self, sequence: Sequence) -> PrefixHit:
        """Look up the sequence's full blocks.

        A hit is capped one token below what is known, rounded down to blocks: at least one token must be
        computed, or there would be no logits to sample from. Where a prompt's log-probabilities are still to be
        reported, logits are needed from there on.
        """
        if not self._enable_prefix_caching:
            return NO_HIT
        max_num_tokens = len(sequence.token_ids) - 1
        if sequence.num_prompt_logprobs_left:
            max_num_tokens = sequence.num_prompt_logprobs_reported
        self.hash_known_tokens(sequence)
        blocks = self._pool.find_longest_prefix(sequence.prefix_hashes[: max_num_tokens // self.block_size])
        return PrefixHit(tuple(blocks), len(blocks) * self.block_size, self._pool.count_evictable(blocks))

    def explain_misses(self, sequence: Sequence, hit: PrefixHit) -> dict[CacheMissReason, int]:
        """Say why the prompt's tokens beyond the hit must be computed; the counts add up to them.

        A block that was evicted longer ago than is remembered counts as not seen.
        """
        num_missed = sequence.num_prompt_tokens - min(hit.num_tokens, sequence.num_prompt_tokens)
        last_useful = (sequence.num_prompt_tokens - 1) // self.block_size
        num_blocks_missed = max(0, last_useful - len(hit.block_ids)) if hit.copied_block_id is None else 0
        misses: Counter[CacheMissReason] = Counter()
        misses[CacheMissReason.TAIL] = num_missed - num_blocks_missed * self.block_size
        if not self._enable_prefix_caching:
            misses[CacheMissReason.CACHING_OFF] = num_blocks_missed * self.block_size
        elif sequence.num_prompt_logprobs_left:
            misses[CacheMissReason.PROMPT_LOGPROBS] = num_blocks_missed * self.block_size
        else:
            for prefix_hash in sequence.prefix_hashes[len(hit.block_ids) : last_useful]:
                misses[self._miss_of(prefix_hash)] += self.block_size
        return {reason: count for reason, count in misses.items() if count}

    def _miss_of(self, prefix_hash: PrefixHash) -> CacheMissReason:
        if self._pool.find_longest_prefix((prefix_hash,)):
            return CacheMissReason.BEHIND_GAP
        return CacheMissReason.EVICTED if prefix_hash in self._evicted else CacheMissReason.NOT_SEEN

    def hash_known_tokens(self, sequence: Sequence) -> None:
        """Complete the hash chain of a sequence without a slot."""
        self._hasher(sequence).extend(sequence.prefix_hashes, sequence.token_ids, len(sequence.token_ids))

    def fork_of(self, parent_slot: int, num_prompt_tokens: int) -> PrefixHit:
        """Return the blocks of a prompt that another choice has computed.

        The last prompt token is computed again, since its logits are gone: all blocks before its own are shared,
        and its own is copied, because both choices will write there.
        """
        num_shared = (num_prompt_tokens - 1) // self.block_size
        blocks = self._table.block_table[parent_slot, : num_shared + 1].tolist()
        return PrefixHit(tuple(blocks[:num_shared]), num_prompt_tokens - 1, 0, copied_block_id=blocks[num_shared])

    def start(self, slot: int, hit: PrefixHit) -> BlockCopy | None:
        """Give a new row the blocks of its hit; the caller has made sure that a block for a copy is available."""
        self._pool.hold(hit.block_ids)
        table, count = self._table, len(hit.block_ids)
        table.block_table[slot, :count] = hit.block_ids
        table.num_blocks[slot] = table.num_committed_blocks[slot] = count
        table.num_computed_tokens[slot] = hit.num_tokens
        if hit.copied_block_id is None:
            return None
        [target] = self._pool.allocate(1)
        table.block_table[slot, count] = target
        table.num_blocks[slot] += 1
        return BlockCopy(hit.copied_block_id, target)

    def missing_blocks(self, slots: Slots, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return, for each row, how many blocks it lacks to hold ``num_tokens`` tokens."""
        missing: npt.NDArray[np.int64] = np.maximum(
            self._layout.blocks_for(num_tokens) - self._table.num_blocks[slots], 0
        )
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

    def commit(self, slots: Slots, num_computed_tokens: npt.NDArray[np.int64]) -> dict[int, list[PrefixHash]]:
        """Make the rows' newly full blocks findable; returns their hashes by handle.

        ``num_computed_tokens`` is what each row had computed when its step ended; steps sent since do not count.
        """
        table = self._table
        num_full = num_computed_tokens // self.block_size
        is_longer = num_full > table.num_committed_blocks[slots]
        longer, lasts = slots[is_longer], num_full[is_longer]
        firsts = table.num_committed_blocks[longer]
        table.num_committed_blocks[longer] = lasts
        if not self._enable_prefix_caching:
            return {}
        return {
            table.sequence_at(slot).handle: self._store(slot, first, last)
            for slot, first, last in zip(longer.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
        }

    def _store(self, slot: int, first: int, last: int) -> list[PrefixHash]:
        """Make the blocks from ``first`` to before ``last`` of a row findable; returns their hashes."""
        table, sequence = self._table, self._table.sequence_at(slot)
        self._hasher(sequence).extend(sequence.prefix_hashes, table.token_ids[slot], last * self.block_size)
        hashes = sequence.prefix_hashes[first:last]
        for block, prefix_hash in zip(table.block_table[slot, first:last].tolist(), hashes, strict=True):
            self._pool.store(block, prefix_hash)
        return hashes

    def free(self, slot: int) -> None:
        """Give back all blocks of a row."""
        self._pool.release(self._table.blocks(slot))
        self._table.num_blocks[slot] = self._table.num_committed_blocks[slot] = 0

    def forget(self, slot: int) -> None:
        """Make all blocks of a row unfindable, those of its hit too: their contents cannot be trusted."""
        self._pool.forget(self._table.blocks(slot))

    def take_changes(self) -> PoolChanges:
        """Return changes of the prefix cache since the last call."""
        changes = self._pool.take_changes()
        self._evicted.add(changes.removed)
        return changes

    def cached_hashes(self) -> Iterator[tuple[PrefixHash, int]]:
        """Iterate over the prefix cache."""
        return self._pool.cached_hashes()

    def reference_counts(self, slot: int) -> list[int]:
        """Return how many holders each block of a row has."""
        return [self._pool.ref_count(block) for block in self._table.blocks(slot)]

    def check_integrity(self) -> list[str]:
        """Compare block tables and pool; returns one sentence per fault."""
        faults: list[str] = []
        for slot in self._table.active_slots.tolist():
            blocks = self._table.blocks(slot)
            if len(set(blocks)) != len(blocks):
                faults.append(f"slot {slot} holds a block twice")
            if len(blocks) * self.block_size < self._table.num_computed_tokens[slot]:
                faults.append(f"slot {slot} has computed more tokens than its blocks hold")
        return faults + self._pool.check_integrity(self._holders())

    def repair(self) -> None:
        """Make the pool agree with the block tables, which are what workers use."""
        self._pool.rebuild(self._holders())

    def _holders(self) -> dict[int, int]:
        holders: dict[int, int] = {}
        for slot in self._table.active_slots.tolist():
            for block in self._table.blocks(slot):
                holders[block] = holders.get(block, 0) + 1
        return holders

    def _hasher(self, sequence: Sequence) -> PrefixHasher:
        request = sequence.request
        return PrefixHasher(self.block_size, request.cache_salt, request.shared_prefix)
