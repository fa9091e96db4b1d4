"""The feed for routers: a snapshot, then numbered changes of load and prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from libs.kv import PrefixHash
from libs.kv.block_pool import PoolChanges
from services.engine.identity import EngineStatus
from services.engine.outbox import Outbox

_MAX_MESSAGES_BEHIND = 4096


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """One event; exactly one of the three is set. ``snapshot_hashes`` comes with a status."""

    incarnation: int
    sequence_number: int
    status: EngineStatus | None = None
    snapshot_hashes: tuple[PrefixHash, ...] | None = None
    changes: PoolChanges | None = None


class EngineFeed:
    """Numbers events and hands them to watchers. A watcher that falls behind is cut off and comes back."""

    def __init__(self) -> None:
        self._outboxes: set[Outbox[FeedEvent]] = set()
        self._incarnation = 0
        self._sequence_number = 0

    def watch(self, status: EngineStatus, hashes: tuple[PrefixHash, ...]) -> Outbox[FeedEvent]:
        """Open a watch that starts with the given state."""
        outbox: Outbox[FeedEvent] = Outbox(_MAX_MESSAGES_BEHIND)
        outbox.put(FeedEvent(self._incarnation, self._sequence_number, status, hashes))
        self._outboxes.add(outbox)
        return outbox

    def unwatch(self, outbox: Outbox[FeedEvent]) -> None:
        """Close a watch."""
        self._outboxes.discard(outbox)

    def begin_incarnation(self, incarnation: int, status: EngineStatus) -> None:
        """Void all that watchers know."""
        self._incarnation, self._sequence_number = incarnation, 0
        for outbox in self._outboxes:
            outbox.put(FeedEvent(incarnation, 0, status, ()))

    def tell_status(self, status: EngineStatus) -> None:
        """Send new load figures."""
        self._send(status=status)

    def tell_changes(self, changes: PoolChanges) -> None:
        """Send changes of the prefix cache, if there are any."""
        if changes.removed or changes.stored:
            self._send(changes=changes)

    def _send(self, *, status: EngineStatus | None = None, changes: PoolChanges | None = None) -> None:
        self._sequence_number += 1
        event = FeedEvent(self._incarnation, self._sequence_number, status, None, changes)
        for outbox in self._outboxes:
            outbox.put(event)
