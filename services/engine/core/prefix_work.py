"""Which prefixes are being computed right now, so that nobody computes the same twice."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from libs.kv import PrefixHash


class PrefixWork:
    """Full blocks of prompts that running sequences have yet to compute, by their hash.

    Two sequences with one prefix that arrive together would both miss the cache. The second asks here, waits for
    the last block that the first will compute of their common prefix, and takes the blocks from the cache then.
    """

    def __init__(self) -> None:
        self._worker_of: dict[PrefixHash, int] = {}
        self._hashes_of: dict[int, list[PrefixHash]] = {}

    def begin(self, handle: int, hashes: SequenceOf[PrefixHash]) -> None:
        """Note that a sequence will compute these blocks, in order; those that another computes are left out."""
        mine = [prefix_hash for prefix_hash in hashes if prefix_hash not in self._worker_of]
        if mine:
            self._worker_of.update(dict.fromkeys(mine, handle))
            # Reversed, so that what is done is popped from the end.
            self._hashes_of[handle] = mine[::-1]

    def finish(self, handle: int, computed: Collection[PrefixHash]) -> list[PrefixHash]:
        """Note that blocks are computed; returns those that were waited for, or could have been."""
        mine = self._hashes_of.get(handle)
        if mine is None:
            return []
        done, finished = set(computed), list[PrefixHash]()
        while mine and mine[-1] in done:
            finished.append(mine.pop())
            del self._worker_of[finished[-1]]
        if not mine:
            del self._hashes_of[handle]
        return finished

    def leave(self, handle: int) -> list[PrefixHash]:
        """Note that a sequence computes nothing more; returns what it leaves undone."""
        undone = self._hashes_of.pop(handle, [])
        for prefix_hash in undone:
            del self._worker_of[prefix_hash]
        return undone

    def last_common(self, missing: SequenceOf[PrefixHash]) -> PrefixHash | None:
        """Return the last of the leading blocks of ``missing`` that are being computed, or None."""
        last = None
        for prefix_hash in missing:
            if prefix_hash not in self._worker_of:
                break
            last = prefix_hash
        return last
