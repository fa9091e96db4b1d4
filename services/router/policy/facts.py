"""The facts that a placement is decided on: requests, engines and what is known of both.

Owns the router's vocabulary of values, all immutable. It must not know where they come from or what time it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from libs.kv import HashContract, PrefixHash

EngineId = NewType("EngineId", str)


class EngineState(StrEnum):
    """Whether an engine takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapacity:
    """What an engine can hold; known once its workers have loaded."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Who an engine is, in one incarnation."""

    engine_id: EngineId
    incarnation: int
    address: str
    model_name: str
    hash_contract: HashContract
    capacity: EngineCapacity | None
    gpu_type: str
    total_vram_bytes: int
    tensor_parallel_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine reports about its work; rates are None until measured."""

    state: EngineState
    num_running_requests: int
    num_waiting_requests: int
    num_pending_prefill_tokens: int
    num_available_blocks: int
    num_blocks: int
    prefill_tokens_per_second: float | None
    decode_step_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A request that needs an engine."""

    request_id: str
    tenant_id: str
    traceparent: str | None
    priority: int
    remaining_seconds: float | None
    model_name: str
    num_prompt_tokens: int
    max_output_tokens: int
    prefix_hashes: tuple[PrefixHash, ...]
    # None only when there are no hashes to compare.
    hash_contract: HashContract | None
    excluded_engine_ids: frozenset[EngineId]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An engine as placement sees it now."""

    identity: EngineIdentity
    state: EngineState
    is_watched: bool
    # False when a lease tells of a later incarnation than the one that is watched.
    is_current: bool
    # None while unknown: never reported, or reported too long ago.
    load: EngineLoad | None
    # Placed by this router and not yet part of ``load``.
    num_unseen_tokens: int
    num_unseen_requests: int
    # Placed by this router and not finished.
    num_placed_requests: int

    @property
    def engine_id(self) -> EngineId:
        """Return the engine's name."""
        return self.identity.engine_id

    @property
    def num_waiting_tokens(self) -> int:
        """Return the prompt tokens that are known to wait there."""
        reported = self.load.num_pending_prefill_tokens if self.load else 0
        return reported + self.num_unseen_tokens

    @property
    def num_requests(self) -> int:
        """Return the requests that are known to be there or on the way."""
        if self.load is None:
            return self.num_placed_requests
        return self.load.num_running_requests + self.load.num_waiting_requests + self.num_unseen_requests


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of one engine for one request."""

    wait_seconds: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that may take the request, with its forecast."""

    engine: EngineFacts
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class ScorerShare:
    """One scorer's weighted share of a candidate's total."""

    name: str
    score: float


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """A candidate with its total score in [0, 1]; the highest wins."""

    candidate: Candidate
    score: float
    shares: tuple[ScorerShare, ...]
