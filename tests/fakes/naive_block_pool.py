"""The block pool as plain dictionaries: slow, and easy to believe."""

from __future__ import annotations

from collections import OrderedDict

from libs.kv import PrefixHash


class NaiveBlockPool:
    """Every block is in exactly one of ``held``, ``evictable`` (least recently used first) and ``free``."""

    def __init__(self, num_blocks: int) -> None:
        self.held: dict[int, int] = {}
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.free: set[int] = set(range(num_blocks))
        self.hash_of: dict[int, PrefixHash] = {}

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.evictable)

    @property
    def block_of(self) -> dict[PrefixHash, int]:
        return {prefix_hash: block for block, prefix_hash in self.hash_of.items()}

    def choose_victims(self, num_blocks: int) -> list[int]:
        """Return the evictable blocks that must go, in order: only those that free blocks cannot spare."""
        return list(self.evictable)[: max(num_blocks - len(self.free), 0)]

    def take(self, blocks: list[int]) -> None:
        for block in blocks:
            self.free.discard(block)
            self.evictable.pop(block, None)
            self.hash_of.pop(block, None)
            self.held[block] = 1

    def find_longest_prefix(self, chain: list[PrefixHash]) -> list[int]:
        found: list[int] = []
        block_of = self.block_of
        for prefix_hash in chain:
            if prefix_hash not in block_of:
                break
            found.append(block_of[prefix_hash])
        return found

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.evictable.pop(block, None)
            self.held[block] = self.held.get(block, 0) + 1

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                if block in self.hash_of:
                    self.evictable[block] = None
                else:
                    self.free.add(block)

    def store(self, block: int, prefix_hash: PrefixHash) -> bool:
        if prefix_hash in self.block_of:
            return False
        self.hash_of[block] = prefix_hash
        return True

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self.hash_of.pop(block, None)
