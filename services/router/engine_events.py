"""What an engine tells on a watch, as the router's own types. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from libs.kv import PrefixHash
from services.router.policy.facts import EngineId, EngineIdentity, EngineLoad, EngineState
from services.router.prefix_index import BlockChanges


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """The first part of a snapshot, beside its hashes."""

    identity: EngineIdentity
    state: EngineState
    load: EngineLoad | None


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of an engine's whole state; ``head`` is given in the first part only."""

    head: SnapshotHead | None
    prefix_hashes: tuple[PrefixHash, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One numbered message of a watch."""

    incarnation: int
    sequence_number: int
    change: SnapshotPart | EngineLoad | BlockChanges


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """Where a watch goes; a configured address says who it is only in its first snapshot."""

    address: str
    engine_id: EngineId | None
