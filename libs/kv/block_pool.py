"""The block pool: all KV blocks of an engine, who holds them, and which can be found by their prefix hash.

Owns reference counts, the free queue and the hash map. Only the KV cache manager calls it. A block is in exactly
one of three states: *held* (reference count above zero), *evictable* (free, but its contents can still be found by
hash) or *free*. The queue of blocks without a holder is an intrusive doubly linked list (as in vLLM's block pool),
so that taking a block out of its middle on a prefix hit costs O(1).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from libs.kv.prefix_hash import PrefixHash


class PoolExhausted(Exception):
    """More blocks were asked for than have no holder; the caller checks first, so this is a fault of ours."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state; the three add up to the pool's size."""

    num_free: int
    num_evictable: int
    num_held: int


@dataclass(frozen=True, slots=True)
class PoolChanges:
    """Prefix hashes that appeared and vanished since the last look, in the order to apply: removed first.

    ``stored`` pairs a hash with the block that holds it.
    """

    removed: tuple[PrefixHash, ...]
    stored: tuple[tuple[PrefixHash, int], ...]


class BlockPool:
    """Blocks ``0 … num_blocks-1``.

    Blocks without a hash are handed out before evictable ones, and these by least recent use. New pools hand out
    ascending ids, so that a sequence's blocks lie side by side in memory.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"A pool needs at least one block, not {num_blocks}.")
        self.num_blocks = num_blocks
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._hashes: list[PrefixHash | None] = [None] * num_blocks
        self._block_of: dict[PrefixHash, int] = {}
        # Positions num_blocks and num_blocks + 1 are the two ends of the list: neither is a block.
        self._head, self._tail = num_blocks, num_blocks + 1
        self._next = array("i", range(1, num_blocks + 3))
        self._previous = array("i", range(-1, num_blocks + 1))
        self._next[num_blocks - 1], self._previous[self._tail] = self._tail, num_blocks - 1
        self._next[self._head], self._previous[0] = 0, self._head
        self._num_unheld = num_blocks
        self._num_evictable = 0
        self._removed: dict[PrefixHash, None] = {}
        self._stored: dict[PrefixHash, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, evictable ones included."""
        return self._num_unheld

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        return BlockCounts(
            num_free=self._num_unheld - self._num_evictable,
            num_evictable=self._num_evictable,
            num_held=self.num_blocks - self._num_unheld,
        )

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, each with one holder, evicting the least recently used contents if needed.

        Raises:
            PoolExhausted: when fewer are available; nothing is taken then.
        """
        if num_blocks > self._num_unheld:
            raise PoolExhausted(f"{num_blocks} blocks wanted, {self._num_unheld} available")
        taken: list[int] = []
        following, block = self._next, self._next[self._head]
        for _ in range(num_blocks):
            if self._hashes[block] is not None:
                self._evict(block)
            self._ref_counts[block] = 1
            taken.append(block)
            block = following[block]
        following[self._head], self._previous[block] = block, self._head
        self._num_unheld -= num_blocks
        return taken

    def find_longest_prefix(self, chain: Sequence[PrefixHash]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of ``chain``, without taking them."""
        found: list[int] = []
        for prefix_hash in chain:
            block = self._block_of.get(prefix_hash)
            if block is None:
                break
            found.append(block)
        return found

    def count_evictable(self, blocks: Iterable[int]) -> int:
        """Count those that have no holder, and would leave the queue when held."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each cached block."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert self._hashes[block] is not None, f"block {block} is held without contents"
                self._unlink(block)
                self._num_unheld -= 1
                self._num_evictable -= 1
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder from each block of a block table, given in the table's order.

        The tail goes first: it is the least likely to be shared, so it is evicted before the head.
        """
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} was released without a holder"
            self._ref_counts[block] = count
            if count:
                continue
            self._num_unheld += 1
            if self._hashes[block] is None:
                self._link_before(block, self._next[self._head])
            else:
                self._num_evictable += 1
                self._link_before(block, self._tail)

    def store(self, block: int, prefix_hash: PrefixHash) -> bool:
        """Make a held, full block findable; returns False when another block already holds that prefix."""
        assert self._ref_counts[block] > 0, f"block {block} is cached without a holder"
        assert self._hashes[block] is None, f"block {block} is cached twice"
        if prefix_hash in self._block_of:
            return False
        self._hashes[block] = prefix_hash
        self._block_of[prefix_hash] = block
        self._stored[prefix_hash] = block
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Make held blocks unfindable, because their contents cannot be trusted; holders keep them."""
        for block in blocks:
            if self._hashes[block] is not None:
                self._drop_hash(block)

    def take_changes(self) -> PoolChanges:
        """Return what changed since the last call; a hash that came and went in between is in neither list."""
        changes = PoolChanges(tuple(self._removed), tuple(self._stored.items()))
        self._removed.clear()
        self._stored.clear()
        return changes

    def cached_hashes(self) -> Iterator[tuple[PrefixHash, int]]:
        """Iterate over all findable prefixes and their blocks."""
        return iter(self._block_of.items())

    def ref_count(self, block: int) -> int:
        """Return the number of holders."""
        return self._ref_counts[block]

    def check_integrity(self, holders: dict[int, int]) -> list[str]:
        """Compare the pool with the true holders of each block; returns one sentence per fault."""
        faults = [
            f"block {block} has {count} holders counted and {holders.get(block, 0)} in block tables"
            for block, count in enumerate(self._ref_counts)
            if count != holders.get(block, 0)
        ]
        faults += [
            f"block {block} is in a block table but not in the pool"
            for block in holders
            if not 0 <= block < self.num_blocks
        ]
        queued = list(self._queue())
        if len(queued) != len(set(queued)):
            faults.append("the free queue holds a block twice")
        unheld = {block for block, count in enumerate(self._ref_counts) if count == 0}
        if set(queued) != unheld:
            faults.append(
                f"{len(unheld ^ set(queued))} blocks differ between the free queue and those without holder"
            )
        if self._num_unheld != len(unheld):
            faults.append(f"{self._num_unheld} blocks counted without holder, {len(unheld)} found")
        evictable = sum(1 for block in unheld if self._hashes[block] is not None)
        if evictable != self._num_evictable:
            faults.append(f"{self._num_evictable} evictable blocks counted, {evictable} found")
        if list(self._queue(is_backwards=True)) != queued[::-1]:
            faults.append("the free queue reads differently backwards")
        hashed = {(value, block) for block, value in enumerate(self._hashes) if value is not None}
        if hashed != set(self._block_of.items()):
            faults.append("the hash map and the blocks' hashes differ")
        is_cached_again = self._removed.keys() & self._block_of.keys() <= self._stored.keys()
        if not (self._stored.items() <= self._block_of.items() and is_cached_again):
            faults.append("the changes to tell and the hash map differ")
        return faults

    def rebuild(self, holders: dict[int, int]) -> None:
        """Make counts, queue and hash map agree with the true holders of each block.

        What can be found keeps being found; blocks that were lost become free, and blocks that were handed out
        twice are held by all their holders.
        """
        order = [block for block in dict.fromkeys(self._queue()) if not holders.get(block)]
        lost = set(range(self.num_blocks)) - set(order) - {block for block, count in holders.items() if count}
        believed = self._block_of.keys() | {value for value in self._hashes if value is not None}
        # A hash is kept where map and block agree; a lost block's contents are not to be trusted.
        kept = {
            value: block
            for block, value in enumerate(self._hashes)
            if value is not None and self._block_of.get(value) == block and block not in lost
        }
        for prefix_hash in believed - kept.keys():
            if self._stored.pop(prefix_hash, None) is None:
                self._removed[prefix_hash] = None
        self._stored = {value: kept[value] for value in self._stored if value in kept}
        for prefix_hash in self._removed.keys() & kept.keys() - self._stored.keys():
            del self._removed[prefix_hash]
        self._block_of = kept
        self._hashes = [None] * self.num_blocks
        for prefix_hash, block in kept.items():
            self._hashes[block] = prefix_hash
        self._ref_counts = array("i", (holders.get(block, 0) for block in range(self.num_blocks)))
        self._head, self._tail = self.num_blocks, self.num_blocks + 1
        self._next[self._head], self._previous[self._tail] = self._tail, self._head
        for block in [*sorted(lost), *order]:
            self._link_before(block, self._tail)
        self._num_unheld = len(lost) + len(order)
        self._num_evictable = sum(1 for block in order if self._hashes[block] is not None)

    def _queue(self, *, is_backwards: bool = False) -> Iterator[int]:
        """Walk the free queue, even a damaged one: at most once around, and never outside the pool."""
        links = self._previous if is_backwards else self._next
        block = links[self._tail if is_backwards else self._head]
        for _ in range(self.num_blocks + 1):
            if not 0 <= block < self.num_blocks:
                return
            yield block
            block = links[block]

    def _evict(self, block: int) -> None:
        self._drop_hash(block)
        self._num_evictable -= 1

    def _drop_hash(self, block: int) -> None:
        prefix_hash = self._hashes[block]
        assert prefix_hash is not None, f"block {block} has no hash to drop"
        self._hashes[block] = None
        del self._block_of[prefix_hash]
        if self._stored.pop(prefix_hash, None) is None:
            self._removed[prefix_hash] = None

    def _link_before(self, block: int, successor: int) -> None:
        predecessor = self._previous[successor]
        self._next[predecessor] = self._previous[successor] = block
        self._previous[block], self._next[block] = predecessor, successor

    def _unlink(self, block: int) -> None:
        predecessor, successor = self._previous[block], self._next[block]
        self._next[predecessor], self._previous[successor] = successor, predecessor
