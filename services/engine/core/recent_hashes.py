"""The prefix hashes that left the cache last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from libs.kv import PrefixHash


class RecentHashes:
    """A bounded set: beyond ``max_hashes`` the first to come are the first to be forgotten."""

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._hashes: OrderedDict[PrefixHash, None] = OrderedDict()

    def __contains__(self, prefix_hash: PrefixHash) -> bool:
        return prefix_hash in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, hashes: Iterable[PrefixHash]) -> None:
        """Add hashes; one that is known counts as new."""
        for prefix_hash in hashes:
            self._hashes[prefix_hash] = None
            self._hashes.move_to_end(prefix_hash)
        while len(self._hashes) > self._max_hashes:
            self._hashes.popitem(last=False)
