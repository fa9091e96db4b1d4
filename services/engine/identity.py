"""What an engine is and how it fares: the domain's own types for what others are told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from libs.kv import HashContract
from services.engine.core.scheduler_load import SchedulerLoad


class EngineState(StrEnum):
    """Whether an engine takes requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the workers said of the model when it was loaded."""

    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: bytes
    vocab_size: int
    gpu_type: str
    total_vram_bytes: int
    kv_cache_bytes: int
    weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Who the engine is in its present incarnation; ``hash_contract`` is None until a model is loaded."""

    engine_id: str
    incarnation: int
    address: str
    model_name: str
    hash_contract: HashContract | None
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_type: str
    total_vram_bytes: int
    tensor_parallel_size: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How the engine fares; rates are None until measured, the load until a model is loaded."""

    state: EngineState
    identity: EngineIdentity
    load: SchedulerLoad | None
    prefill_tokens_per_second: float | None
    decode_step_seconds: float | None
