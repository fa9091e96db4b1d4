"""What a gateway knows of engines and how it asks for one, as its own types. Owns no behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from libs.kv import HashContract, PrefixHash


class EngineState(StrEnum):
    """Whether an engine takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """An engine's identity and load when it was last heard of."""

    engine_id: str
    address: str
    model_name: str
    state: EngineState
    hash_contract: HashContract
    max_model_len: int
    num_running_requests: int
    num_waiting_requests: int
    num_blocks_used: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementAsk:
    """A request as a router needs to know it."""

    request_id: str
    tenant_id: str
    traceparent: str | None
    model_name: str
    num_prompt_tokens: int
    max_output_tokens: int
    prefix_hashes: Sequence[PrefixHash]
    hash_contract: HashContract
    priority: int = 0
    excluded_engine_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine that a request goes to."""

    engine_id: str
    address: str
