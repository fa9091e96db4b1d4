"""The prefix index: which prefix hashes each engine holds. Pure.

Owns a set of hashes for each engine and the numbering that tells whether the set can be trusted. It must not know
how events arrive. An engine's entries depend on no other engine's, so removing one frees all its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.kv import PrefixHash
from services.router.policy.facts import EngineId


class ResyncNeeded(Exception):
    """What is known of an engine cannot be trusted any more: a new snapshot is needed."""


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Changes in an engine's prefix cache: clearing, then removals, then stores."""

    removed_hashes: tuple[PrefixHash, ...]
    stored_hashes: tuple[PrefixHash, ...]
    is_cleared: bool


@dataclass(frozen=True, slots=True)
class EventCursor:
    """The last event of an engine that has been applied."""

    incarnation: int
    sequence_number: int

    def advance(self, incarnation: int, sequence_number: int) -> EventCursor:
        """Return the cursor at the next event.

        Raises:
            ResyncNeeded: when the event is not the next one of this incarnation.
        """
        if incarnation != self.incarnation:
            raise ResyncNeeded(f"Incarnation {incarnation} without a snapshot after {self.incarnation}.")
        if sequence_number != self.sequence_number + 1:
            raise ResyncNeeded(f"Event {sequence_number} after {self.sequence_number}.")
        return EventCursor(incarnation, sequence_number)


class PrefixIndex:
    """Sets of prefix hashes by engine, each bounded and bounded together.

    Hashes beyond a bound are left out and counted; they are prefix matches missed, nothing worse.
    """

    def __init__(self, *, max_hashes_per_engine: int, max_hashes: int) -> None:
        self._max_hashes_per_engine = max_hashes_per_engine
        self._max_hashes = max_hashes
        self._hashes: dict[EngineId, set[PrefixHash]] = {}
        self.num_hashes = 0
        self.num_left_out = 0

    def replace(self, engine_id: EngineId, hashes: Iterable[PrefixHash]) -> None:
        """Forget what is known of an engine and start from a snapshot."""
        self.remove(engine_id)
        self._hashes[engine_id] = set()
        self._store(engine_id, hashes)

    def apply(self, engine_id: EngineId, changes: BlockChanges) -> None:
        """Apply changes to an engine that has a snapshot; removing an unknown hash changes nothing."""
        held = self._hashes[engine_id]
        if changes.is_cleared:
            self.num_hashes -= len(held)
            held = self._hashes[engine_id] = set()
        before = len(held)
        held.difference_update(changes.removed_hashes)
        self.num_hashes += len(held) - before
        self._store(engine_id, changes.stored_hashes)

    def remove(self, engine_id: EngineId) -> None:
        """Forget an engine."""
        self.num_hashes -= len(self._hashes.pop(engine_id, ()))

    def num_hashes_of(self, engine_id: EngineId) -> int:
        """Return how many hashes an engine is believed to hold."""
        return len(self._hashes.get(engine_id, ()))

    def num_matching_blocks(self, engine_id: EngineId, chain: Sequence[PrefixHash]) -> int:
        """Return how many leading blocks of ``chain`` the engine holds."""
        held = self._hashes.get(engine_id)
        if not held:
            return 0
        for index, prefix_hash in enumerate(chain):
            if prefix_hash not in held:
                return index
        return len(chain)

    def _store(self, engine_id: EngineId, hashes: Iterable[PrefixHash]) -> None:
        held = self._hashes[engine_id]
        before = len(held)
        most = min(self._max_hashes_per_engine, before + self._max_hashes - self.num_hashes)
        for prefix_hash in hashes:
            if len(held) < most:
                held.add(prefix_hash)
            elif prefix_hash not in held:
                self.num_left_out += 1
        self.num_hashes += len(held) - before
