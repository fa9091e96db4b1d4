"""How much memory a model's load takes: what is said before, and what the KV cache gets of the rest."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from libs.errors import ModelLoadFailed
from libs.obs import get_logger
from services.worker.config import Quantization, WeightsType, WorkerConfig, parse_size
from services.worker.kv_cache import CacheBudget, KVCachePlan, MemoryState, measure_memory, plan_kv_cache
from services.worker.prompt_logprobs import MAX_ROWS_AT_A_TIME
from services.worker.resident_memory import MemoryStatement, give_back_freed_memory, measure_memory_in_use
from services.worker.step import LoadRequest
from services.worker.warm_up import MAX_WARM_SEQUENCES, MAX_WARM_TOKENS
from services.worker.weights import ModelConfig

_DTYPES = {WeightsType.BFLOAT16: torch.bfloat16, WeightsType.FLOAT32: torch.float32}
# Set aside beside what the formula for a step's memory counts.
_SLACK_BYTES = 64 * 2**20

_log = get_logger("memory_plan")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one rank's share of a model, ``model``, needs to serve what was asked for."""

    config: WorkerConfig
    request: LoadRequest
    model: ModelConfig

    @property
    def dtype(self) -> torch.dtype:
        """In which numbers are activations and the KV cache."""
        return _DTYPES[self.config.dtype]

    def state(self) -> MemoryStatement:
        """Say what loading is going to take; raises ModelLoadFailed when that is more than there is."""
        memory, weights_bytes = measure_memory(), self.model.num_parameters * self._weight_dtype.itemsize
        self._require_room_for(weights_bytes, memory)
        beside_weights = dataclasses.replace(memory, available_bytes=memory.available_bytes - weights_bytes)
        # An earlier load may have left memory behind that this one would seem to give back.
        give_back_freed_memory()
        statement = MemoryStatement(
            before_bytes=measure_memory_in_use().resident_bytes,
            weights_bytes=weights_bytes,
            kv_cache_bytes=self.plan_cache(beside_weights).size_bytes,
            workspace_bytes=self._workspace_bytes(
                min(self.request.max_num_batched_tokens, MAX_WARM_TOKENS),
                min(self.request.max_num_seqs, MAX_WARM_SEQUENCES),
            ),
        )
        _log.info(
            "memory expected",
            expected_resident_bytes=statement.expected_bytes,
            resident_bytes_now=statement.before_bytes,
            weights_bytes=statement.weights_bytes,
            kv_cache_bytes=statement.kv_cache_bytes,
            workspace_bytes=statement.workspace_bytes,
        )
        return statement

    def plan_cache(self, memory: MemoryState) -> KVCachePlan:
        """Divide what ``memory`` has left into KV blocks; raises ModelLoadFailed when there is no room for one."""
        return plan_kv_cache(
            self.model,
            block_size=self.request.block_size,
            dtype=self.dtype,
            budget=CacheBudget(
                requested_bytes=self.config.requested_kv_cache_bytes,
                fraction=self.config.kv_cache_memory_fraction,
                limit_bytes=parse_size(self.config.kv_cache_memory_limit),
            ),
            memory=memory,
            reserved_bytes=_SLACK_BYTES
            + self._workspace_bytes(self.request.max_num_batched_tokens, self.request.max_num_seqs),
        )

    @property
    def _weight_dtype(self) -> torch.dtype:
        return torch.int8 if self.config.quantization is Quantization.INT8 else self.dtype

    def _require_room_for(self, weights_bytes: int, memory: MemoryState) -> None:
        if weights_bytes > memory.available_bytes:
            raise ModelLoadFailed(
                f"The weights take {weights_bytes} bytes as {self._weight_dtype}, but only "
                f"{memory.available_bytes} bytes of memory are available; free some or serve a smaller model."
            )

    def _workspace_bytes(self, num_tokens: int, num_sampled: int) -> int:
        """Estimate what a step of that size allocates: activations of one layer, and logits."""
        num_values_per_token = 12 * self.model.hidden_size + 4 * self.model.intermediate_size
        activations = num_tokens * num_values_per_token * self.dtype.itemsize
        # Logits exist in the model's dtype and in fp32, and once more as scores.
        num_rows = num_sampled + MAX_ROWS_AT_A_TIME
        logits = num_rows * self.model.vocab_size * (self.dtype.itemsize + 2 * torch.float32.itemsize)
        return activations + logits
