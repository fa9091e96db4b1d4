"""The engine directory: all that the router knows of engines, with one owner.

Owns identities, states, loads, prefix hashes and what was placed where; applies what leases and watches tell, in
order, and fences what is old. It must not know sockets, Redis or the clock: times are arguments.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.errors import EngineLost
from libs.kv import PrefixHash
from services.router.engine_events import SnapshotHead, SnapshotPart, WatchEvent, WatchTarget
from services.router.placed_load import PlacedLoad, PlacementKey
from services.router.policy.facts import EngineFacts, EngineId, EngineIdentity, EngineLoad, EngineState
from services.router.prefix_index import BlockChanges, EventCursor, PrefixIndex, ResyncNeeded

_MAX_MODEL_NAMES: Final = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """An engine as operators see it."""

    identity: EngineIdentity
    state: EngineState
    load: EngineLoad | None
    is_watched: bool
    num_indexed_hashes: int
    num_placed_requests: int


@dataclass(slots=True)
class _Entry:
    """What is known of one engine. ``cursor`` is set while a complete snapshot is being kept current."""

    identity: EngineIdentity
    placed: PlacedLoad
    target: WatchTarget | None = None
    leased_incarnation: int | None = None
    state: EngineState = EngineState.STARTING
    load: EngineLoad | None = None
    load_received_at: float = 0.0
    cursor: EventCursor | None = None

    @property
    def is_watched(self) -> bool:
        return self.cursor is not None

    @property
    def is_current(self) -> bool:
        return self.leased_incarnation is None or self.identity.incarnation >= self.leased_incarnation


@dataclass(slots=True)
class _StagedSnapshot:
    """A snapshot whose last part has not come yet."""

    head: SnapshotHead
    prefix_hashes: list[PrefixHash] = field(default_factory=list)


class EngineDirectory:
    """Engines by id. Watches write, placement reads and counts."""

    def __init__(
        self, *, report_lag_seconds: float, load_stale_seconds: float, max_hashes_per_engine: int, max_hashes: int
    ) -> None:
        self._report_lag_seconds = report_lag_seconds
        self._load_stale_seconds = load_stale_seconds
        self._max_hashes_per_engine = max_hashes_per_engine
        self.index = PrefixIndex(max_hashes_per_engine=max_hashes_per_engine, max_hashes=max_hashes)
        self._entries: dict[EngineId, _Entry] = {}
        self._staged: dict[WatchTarget, _StagedSnapshot] = {}
        self._unidentified: set[WatchTarget] = set()
        # Of all engines that were ever known, the latest last: a model does not cease to exist with an engine.
        self._model_names: OrderedDict[str, None] = OrderedDict()

    # What leases and configuration say.

    def expect(self, target: WatchTarget) -> None:
        """Note a configured address that has not said yet which model it serves."""
        self._unidentified.add(target)

    def set_lease(self, leased: EngineIdentity) -> None:
        """Note that an engine holds a lease; a later incarnation in it fences the one that is watched."""
        entry = self._entries.get(leased.engine_id)
        if entry is None:
            entry = self._entries[leased.engine_id] = self._new_entry(leased)
        elif not entry.is_watched and leased.incarnation >= entry.identity.incarnation:
            entry.identity = leased
        self._note_model(leased.model_name)
        entry.leased_incarnation = leased.incarnation

    def end_lease(self, engine_id: EngineId) -> None:
        """Forget an engine whose lease ended, with its prefix hashes and placed requests."""
        entry = self._entries.get(engine_id)
        if entry is None:
            return
        if entry.target is not None and entry.target.engine_id is None:
            # A configured engine stays as long as it is configured.
            entry.leased_incarnation = None
        else:
            self._drop(engine_id)

    # What watches say.

    def apply(self, target: WatchTarget, event: WatchEvent, now: float) -> None:
        """Apply one event of the watch on ``target``.

        Raises:
            ResyncNeeded: when the event does not follow the one before it; open a new watch.
            EngineLost: when the engine behind the address is not the one that is looked for.
        """
        if isinstance(event.change, SnapshotPart):
            self._apply_snapshot_part(target, event, event.change, now)
            return
        entry = self._entry_of(target)
        if entry is None or entry.cursor is None or target in self._staged:
            raise ResyncNeeded("A change came before the snapshot was complete.")
        entry.cursor = entry.cursor.advance(event.incarnation, event.sequence_number)
        if isinstance(event.change, BlockChanges):
            self.index.apply(entry.identity.engine_id, event.change)
        else:
            self._apply_load(entry, event.change, now)

    def suspend(self, target: WatchTarget) -> None:
        """Void what the watch on ``target`` told, after a gap; placed requests still count."""
        self._staged.pop(target, None)
        entry = self._entry_of(target)
        if entry is not None:
            entry.cursor = None
            entry.load = None
            self.index.remove(entry.identity.engine_id)

    def lose(self, target: WatchTarget) -> None:
        """Void what the watch on ``target`` told and what was placed there: the connection broke."""
        entry = self._entry_of(target)
        self.suspend(target)
        if entry is not None:
            entry.placed = PlacedLoad(self._report_lag_seconds)

    # What placement asks and counts.

    def facts(self, now: float) -> list[EngineFacts]:
        """Return all engines as placement sees them now."""
        return [
            EngineFacts(
                identity=entry.identity,
                state=entry.state,
                is_watched=entry.is_watched,
                is_current=entry.is_current,
                load=entry.load if now - entry.load_received_at <= self._load_stale_seconds else None,
                num_unseen_tokens=entry.placed.num_unseen_tokens,
                num_unseen_requests=entry.placed.num_unseen,
                num_placed_requests=entry.placed.num_placed,
            )
            for entry in self._entries.values()
        ]

    def knows_any(self) -> bool:
        """Tell whether any engine is known."""
        return bool(self._entries)

    def may_serve(self, model_name: str) -> bool:
        """Tell whether engines of a model may come: there were some, or a configured address has yet to say."""
        return model_name in self._model_names or bool(self._unidentified)

    def num_cached_tokens(self, facts: EngineFacts, chain: Sequence[PrefixHash], num_prompt_tokens: int) -> int:
        """Return the prompt tokens expected in the engine's cache; the last token is always computed."""
        num_blocks = self.index.num_matching_blocks(facts.engine_id, chain)
        return max(0, min(num_blocks * facts.identity.hash_contract.block_size, num_prompt_tokens - 1))

    def count_placed(self, engine_id: EngineId, key: PlacementKey, num_tokens: int, now: float) -> None:
        """Count a request on an engine that was just picked."""
        self._entries[engine_id].placed.place(key, num_tokens, now)

    def count_started(self, engine_id: EngineId, key: PlacementKey) -> None:
        """Take a request's prompt off its engine; an engine that was lost meanwhile counts nothing."""
        if entry := self._entries.get(engine_id):
            entry.placed.start(key)

    def count_finished(self, engine_id: EngineId, key: PlacementKey) -> None:
        """Take a request off its engine; an engine that was lost meanwhile counts nothing."""
        if entry := self._entries.get(engine_id):
            entry.placed.finish(key)

    # What operators ask.

    def statuses(self) -> list[EngineStatus]:
        """Return all engines by id."""
        return [
            EngineStatus(
                identity=entry.identity,
                state=entry.state,
                load=entry.load,
                is_watched=entry.is_watched,
                num_indexed_hashes=self.index.num_hashes_of(engine_id),
                num_placed_requests=entry.placed.num_placed,
            )
            for engine_id, entry in sorted(self._entries.items())
        ]

    def is_watching(self, target: WatchTarget) -> bool:
        """Tell whether the watch on ``target`` has given a complete snapshot and keeps it current."""
        entry = self._entry_of(target)
        return entry is not None and entry.is_watched

    def watched_state(self, engine_id: EngineId) -> EngineState | None:
        """Return an engine's state; None when no watch on it is alive and complete."""
        entry = self._entries.get(engine_id)
        return entry.state if entry is not None and entry.is_watched else None

    def _new_entry(self, identity: EngineIdentity) -> _Entry:
        return _Entry(identity, PlacedLoad(self._report_lag_seconds))

    def _note_model(self, model_name: str) -> None:
        self._model_names[model_name] = None
        self._model_names.move_to_end(model_name)
        if len(self._model_names) > _MAX_MODEL_NAMES:
            self._model_names.popitem(last=False)

    def _drop(self, engine_id: EngineId) -> None:
        entry = self._entries.pop(engine_id)
        if entry.target is not None:
            self._staged.pop(entry.target, None)
        self.index.remove(engine_id)

    def _entry_of(self, target: WatchTarget) -> _Entry | None:
        entries = self._entries
        if target.engine_id is not None:
            entry = entries.get(target.engine_id)
            return entry if entry is not None and entry.target == target else None
        return next((entry for entry in entries.values() if entry.target == target), None)

    def _apply_snapshot_part(self, target: WatchTarget, event: WatchEvent, part: SnapshotPart, now: float) -> None:
        if part.head is not None:
            self._check_identity(target, part.head.identity, event.incarnation)
            self.suspend(target)
            self._staged[target] = _StagedSnapshot(part.head)
        staged = self._staged.get(target)
        if staged is None or staged.head.identity.incarnation != event.incarnation:
            raise ResyncNeeded("A part of a snapshot came without its first part.")
        room = self._max_hashes_per_engine - len(staged.prefix_hashes)
        staged.prefix_hashes.extend(part.prefix_hashes[:room])
        self.index.num_left_out += max(0, len(part.prefix_hashes) - room)
        if part.is_last:
            del self._staged[target]
            self._install(target, staged, EventCursor(event.incarnation, event.sequence_number), now)

    def _check_identity(self, target: WatchTarget, identity: EngineIdentity, incarnation: int) -> None:
        if identity.incarnation != incarnation:
            raise ResyncNeeded(f"A snapshot of incarnation {identity.incarnation} says {incarnation} in its event.")
        if target.engine_id is not None and target.engine_id != identity.engine_id:
            raise EngineLost(f"At {target.address} is {identity.engine_id}, not {target.engine_id}.")
        entry = self._entries.get(identity.engine_id)
        if entry is None or entry.target in (None, target) or not entry.is_watched:
            return
        if identity.incarnation <= entry.identity.incarnation:
            raise EngineLost(
                f"{identity.engine_id} at {target.address} has incarnation {identity.incarnation}, but "
                f"{entry.identity.incarnation} is watched at {entry.identity.address}."
            )

    def _install(self, target: WatchTarget, staged: _StagedSnapshot, cursor: EventCursor, now: float) -> None:
        # Where the watch reached it is where gateways reach it; an engine may know itself as 0.0.0.0 only.
        identity = dataclasses.replace(staged.head.identity, address=target.address)
        self._unidentified.discard(target)
        previous = self._entry_of(target)
        if previous is not None and previous.identity.engine_id != identity.engine_id:
            # Another engine has taken over a configured address.
            self._drop(previous.identity.engine_id)
        entry = self._entries.get(identity.engine_id)
        if entry is None:
            entry = self._entries[identity.engine_id] = self._new_entry(identity)
        if entry.identity.incarnation != identity.incarnation:
            # The requests of an earlier incarnation died with it.
            entry.placed = PlacedLoad(self._report_lag_seconds)
        entry.identity, entry.state, entry.target, entry.cursor = identity, staged.head.state, target, cursor
        entry.load = None
        self._note_model(identity.model_name)
        self.index.replace(identity.engine_id, staged.prefix_hashes)
        if staged.head.load is not None:
            self._take_load(entry, staged.head.load, now)

    def _apply_load(self, entry: _Entry, load: EngineLoad, now: float) -> None:
        if entry.state is EngineState.STARTING and load.state is EngineState.READY:
            # What loading found out (contract, capacity, incarnation) is in the snapshot only.
            raise ResyncNeeded("The engine became ready.")
        self._take_load(entry, load, now)

    def _take_load(self, entry: _Entry, load: EngineLoad, now: float) -> None:
        entry.state, entry.load, entry.load_received_at = load.state, load, now
        entry.placed.on_report(now, load.num_running_requests + load.num_waiting_requests)
