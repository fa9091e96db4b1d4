"""The runner of real models: a step as tensors, a forward pass, and a sample.

Owns the weights, the KV cache and the sampler of one rank. It must not know the wire or who owns a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from libs.errors import InternalError, ModelLoadFailed
from libs.text import load_model_text, resolve_model_path
from services.worker.config import WeightsType, WorkerConfig, parse_size
from services.worker.forward_pass import ForwardPass, load_forward_pass
from services.worker.input_batch import BatchLimits, FlatBatch, InputBatch
from services.worker.kv_cache import CacheBudget, KVCache, KVCachePlan, measure_memory, plan_kv_cache
from services.worker.logits_processors import TokenHistory
from services.worker.sampler import Sampler
from services.worker.step import (
    FailedSequence,
    LoadedModel,
    LoadProgress,
    LoadRequest,
    NewSequence,
    SampledTokens,
    SequenceFailure,
    StepInput,
    StepResult,
)
from services.worker.weight_files import open_weights
from services.worker.weights import ModelConfig, WeightReader

_DTYPES = {WeightsType.BFLOAT16: torch.bfloat16, WeightsType.FLOAT32: torch.float32}

# Set aside beside what the formula for a step's memory counts.
_SLACK_BYTES = 64 * 2**20


_NOT_NUMBERS = "The model gave logits that are not numbers."


class TorchRunner:
    """A ``ModelRunner`` on torch. All methods are called from one thread: torch's thread count belongs to it."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._dtype = _DTYPES[config.dtype]
        self._loaded: _Loaded | None = None

    def load(self, request: LoadRequest, on_progress: Callable[[LoadProgress], None]) -> LoadedModel:
        """Load the weights and allocate the KV cache; what was loaded before is given up first.

        Raises:
            ModelLoadFailed: when the model cannot be served here.
        """
        self._loaded = None
        torch.set_num_threads(self._config.num_threads_used)
        path = resolve_model_path(self._config.model)
        text = load_model_text(path)
        source = open_weights(path)
        _require_memory_for_weights(source.config, self._dtype)
        reader = WeightReader(
            source, self._dtype, lambda done, total: on_progress(LoadProgress("reading weights", done, total))
        )
        with torch.inference_mode():
            model = load_forward_pass(
                self._config.kernels,
                source.config,
                reader,
                dtype=self._dtype,
                block_size=request.block_size,
                num_threads=self._config.num_threads_used,
                quantization=self._config.quantization,
            )
            on_progress(LoadProgress("allocating the KV cache", reader.total_bytes, reader.total_bytes))
            cache = model.make_cache(self._plan_cache(request, source.config))
        limits = BatchLimits(
            max_num_seqs=request.max_num_seqs,
            max_model_len=_max_model_len(request, min(text.max_model_len, source.config.max_position)),
            max_num_batched_tokens=request.max_num_batched_tokens,
            num_blocks=cache.plan.num_blocks,
            block_size=request.block_size,
            vocab_size=source.config.vocab_size,
        )
        sampler = Sampler(
            max_num_seqs=limits.max_num_seqs, vocab_size=limits.vocab_size, eos_token_ids=text.eos_token_ids
        )
        self._loaded = _Loaded(model, cache, InputBatch(limits), sampler)
        return LoadedModel(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=text.eos_token_ids,
            tokenizer_digest=text.tokenizer_digest,
            vocab_size=limits.vocab_size,
            gpu_type="CPU",
            total_vram_bytes=measure_memory().total_bytes,
            kv_cache_bytes=cache.plan.size_bytes,
            weights_bytes=model.weight_bytes,
        )

    def reset(self) -> None:
        """Forget all sequences; what is in the KV cache stays."""
        if self._loaded is not None:
            self._loaded.batch.reset()

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepResult:
        """Run one step: apply the difference, compute, sample, append."""
        started = time.perf_counter()
        if self._loaded is None:
            raise InternalError("A step came before the model was loaded.")
        if len(step.copy_source_block_ids):
            self._loaded.cache.copy_blocks(
                torch.from_numpy(step.copy_source_block_ids), torch.from_numpy(step.copy_target_block_ids)
            )
        prepared = self._loaded.batch.prepare(step, self._loaded.admit)
        sampled, num_computed_tokens = SampledTokens.none(), 0
        if prepared.batch is not None:
            sampled, num_computed_tokens = self._loaded.compute(prepared.batch), len(prepared.batch.token_ids)
        return StepResult.of(
            step,
            sampled,
            prepared.failed_sequences,
            num_computed_tokens=num_computed_tokens,
            duration_seconds=time.perf_counter() - started,
        )

    def _plan_cache(self, request: LoadRequest, config: ModelConfig) -> KVCachePlan:
        # Weights and all that reading them took are in memory now, so what is free is what the cache can have.
        return plan_kv_cache(
            config,
            block_size=request.block_size,
            dtype=self._dtype,
            budget=CacheBudget(
                requested_bytes=self._config.requested_kv_cache_bytes,
                fraction=self._config.kv_cache_memory_fraction,
                limit_bytes=parse_size(self._config.kv_cache_memory_limit),
            ),
            memory=measure_memory(),
            reserved_bytes=_step_bytes(request, config, self._dtype),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """What exists from loading on."""

    model: ForwardPass
    cache: KVCache
    batch: InputBatch
    sampler: Sampler

    def admit(self, sequence: NewSequence) -> None:
        """Take a new sequence's sampling parameters; raises InvalidRequest for those that do not fit the model."""
        self.sampler.add(sequence.slot, sequence.sampling_params, sequence.choice_index)

    def compute(self, batch: FlatBatch) -> SampledTokens:
        """Run the forward pass and choose a token for each sequence whose last known token was computed."""
        forwarded = self.model.run(batch)
        is_finite = forwarded.is_finite
        failed = [] if is_finite.all() else self._fail_sequences(batch, ~is_finite)
        is_sampled = batch.is_sampled & is_finite
        slots = batch.slots[is_sampled]
        token_ids = np.empty(0, dtype=np.int64)
        if len(slots):
            logits = forwarded.logits(is_sampled)
            rows = self.sampler.sample(logits, slots, self.batch.num_output_tokens(slots), self._histories(slots))
            failed += [
                self.batch.fail(slot, SequenceFailure.INVALID_LOGITS, _NOT_NUMBERS)
                for slot in slots[~rows.is_valid].tolist()
            ]
            slots, token_ids = slots[rows.is_valid], rows.token_ids[rows.is_valid]
        self.batch.commit(batch, slots, token_ids)
        return SampledTokens(slots, token_ids, tuple(failed))

    def _histories(self, slots: NDArray[np.int64]) -> dict[int, TokenHistory]:
        return {
            row: TokenHistory(self.batch.token_ids_of(slot), self.batch.num_prompt_tokens(slot))
            for row, slot in enumerate(slots.tolist())
            if self.sampler.has_processors(slot)
        }

    def _fail_sequences(self, batch: FlatBatch, is_failed: NDArray[np.bool_]) -> list[FailedSequence]:
        """Fail sequences whose hidden states are not finite, and take what they wrote out of the cache."""
        slots_written = batch.slot_mapping[batch.rows_of(is_failed)]
        self.cache.clear_slots(torch.from_numpy(slots_written))
        return [
            self.batch.fail(slot, SequenceFailure.INVALID_LOGITS, _NOT_NUMBERS)
            for slot in batch.slots[is_failed].tolist()
        ]


def _require_memory_for_weights(config: ModelConfig, dtype: torch.dtype) -> None:
    needed_bytes, available_bytes = config.num_parameters * dtype.itemsize, measure_memory().available_bytes
    if needed_bytes > available_bytes:
        raise ModelLoadFailed(
            f"The weights take {needed_bytes} bytes as {dtype}, but only {available_bytes} bytes of memory are "
            "available; free some or serve a smaller model."
        )


def _max_model_len(request: LoadRequest, model_limit: int) -> int:
    if request.max_model_len is not None and request.max_model_len > model_limit:
        raise ModelLoadFailed(
            f"max_model_len was asked to be {request.max_model_len} tokens, but the model's own limit is "
            f"{model_limit}."
        )
    return request.max_model_len or model_limit


def _step_bytes(request: LoadRequest, config: ModelConfig, dtype: torch.dtype) -> int:
    """Estimate what the largest step allocates: activations of one layer, logits, and slack."""
    num_values_per_token = 12 * config.hidden_size + 4 * config.intermediate_size
    activations = request.max_num_batched_tokens * num_values_per_token * dtype.itemsize
    # Logits exist in the model's dtype and in fp32, and once more as scores.
    logits = request.max_num_seqs * config.vocab_size * (dtype.itemsize + 2 * torch.float32.itemsize)
    return activations + logits + _SLACK_BYTES
