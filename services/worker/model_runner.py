"""The runner of real models: a step as tensors, a forward pass, and a sample.

Owns the weights, the KV cache and the sampler of one rank. It must not know the wire or who owns a request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from libs.errors import InternalError, ModelLoadFailed
from libs.obs import get_logger
from libs.text import ModelText, load_model_text, resolve_model_path
from services.worker.config import Quantization, WeightsType, WorkerConfig, parse_size
from services.worker.draft_verifier import sample_sequences
from services.worker.exchange import ExchangeLayout
from services.worker.forward_pass import ForwardPass, load_forward_pass, make_row_sampler
from services.worker.grammar_matcher import GrammarMatchers
from services.worker.input_batch import BatchLimits, FlatBatch, InputBatch
from services.worker.kv_cache import (
    CacheBudget,
    KVCache,
    KVCachePlan,
    MemoryState,
    measure_memory,
    plan_kv_cache,
)
from services.worker.models.shard import plan_shard
from services.worker.prompt_logprobs import MAX_ROWS_AT_A_TIME, PromptScorer
from services.worker.rank_group import FormGroup, Membership, RankGroup
from services.worker.rendezvous import form_group
from services.worker.resident_memory import MemoryStatement, give_back_freed_memory, measure_memory_in_use
from services.worker.row_sampler import RowStatus
from services.worker.sampler import Sampler
from services.worker.settling import Settling
from services.worker.step import (
    FailedSequence,
    LoadedModel,
    LoadProgress,
    LoadRequest,
    NewSequence,
    OutputLogprobs,
    SampledTokens,
    SequenceFailure,
    StepInput,
    StepResult,
)
from services.worker.token_mask import TokenMatcher
from services.worker.warm_up import MAX_WARM_SEQUENCES, MAX_WARM_TOKENS, WarmUp, plan_warm_up
from services.worker.weight_files import open_weights
from services.worker.weights import ModelConfig, WeightReader
from services.worker.work_counter import WorkCounter

_log = get_logger("model_runner")


class Matchers(Protocol):
    """Makes what follows the grammars of one model's sequences."""

    def matcher_of(self, sequence: NewSequence) -> TokenMatcher | None:
        """Return what follows a new sequence's grammar, after the output that it has; None without a grammar."""
        ...

    def close(self) -> None:
        """Give up what was prepared."""
        ...


_DTYPES = {WeightsType.BFLOAT16: torch.bfloat16, WeightsType.FLOAT32: torch.float32}

# Set aside beside what the formula for a step's memory counts.
_SLACK_BYTES = 64 * 2**20


_NOT_NUMBERS = "The model gave logits that are not numbers."
_NO_TOKEN_LEFT = (
    "No token may come next: the grammar, allowed_token_ids, bad_words and min_tokens leave none together. "
    "Loosen them."
)


class TorchRunner:
    """A ``ModelRunner`` on torch. All methods are called from one thread: torch's thread count belongs to it."""

    def __init__(
        self,
        config: WorkerConfig,
        new_matchers: Callable[[ModelText], Matchers] = GrammarMatchers,
        form_group: FormGroup = form_group,
    ) -> None:
        """Begin without a model; ``new_matchers`` and ``form_group`` are called with each that is loaded."""
        self._config = config
        self._form_group = form_group
        self._new_matchers = new_matchers
        self._dtype = _DTYPES[config.dtype]
        self._loaded: _Loaded | None = None
        self._settling: Settling | None = None

    def load(self, request: LoadRequest, on_progress: Callable[[LoadProgress], None]) -> LoadedModel:
        """Load the weights and allocate the KV cache; what was loaded before is given up first.

        Raises:
            ModelLoadFailed: when the model cannot be served here.
        """
        self.unload()
        torch.set_num_threads(self._config.num_threads_used)
        path = resolve_model_path(self._config.model)
        text = load_model_text(path)
        source = open_weights(path)
        max_model_len = _max_model_len(request, min(text.max_model_len, source.config.max_position))
        shard = plan_shard(source.config, request.rank, request.tensor_parallel_size)
        config = shard.config_of(source.config)
        statement = self._state_memory(request, config)
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
                shard=shard,
            )
            on_progress(LoadProgress("allocating the KV cache", reader.total_bytes, reader.total_bytes))
            machine_limits = model.measure_limits()
            plan = self._plan_cache(request, config, measure_memory())
            waiting = LoadProgress("waiting for the other ranks", reader.total_bytes, reader.total_bytes)
            membership = self._membership(request, source.config, model, plan)
            group = self._form_group(membership, lambda: on_progress(waiting))
            cache = _make_cache(model, plan, group)
        limits = BatchLimits(
            max_num_seqs=request.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=request.max_num_batched_tokens,
            num_blocks=cache.plan.num_blocks,
            block_size=request.block_size,
            vocab_size=source.config.vocab_size,
        )
        row_sampler = make_row_sampler(
            self._config.kernels,
            model,
            vocab_size=limits.vocab_size,
            num_threads=self._config.num_threads_used,
        )
        sampler = Sampler(
            max_num_seqs=limits.max_num_seqs,
            vocab_size=limits.vocab_size,
            eos_token_ids=text.eos_token_ids,
            row_sampler=row_sampler,
        )
        self._loaded = _Loaded(
            model,
            cache,
            InputBatch(limits),
            sampler,
            PromptScorer(row_sampler, max_num_seqs=limits.max_num_seqs),
            self._new_matchers(text),
            WorkCounter(
                dataclasses.replace(config, vocab_size=shard.head_rows.size),
                model.weight_sizes,
                kv_value_bytes=self._dtype.itemsize,
            ),
            group,
        )
        on_progress(LoadProgress("warming up", reader.total_bytes, reader.total_bytes))
        self._warm_up(plan_warm_up(limits))
        self._settling = Settling(cache.populate, statement)
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
            limits=machine_limits,
        )

    def unload(self) -> None:
        """Give up what was loaded, and leave the group of ranks."""
        if self._settling is not None:
            self._settling.stop()
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = None

    def wait_until_settled(self) -> None:
        """Wait until the cache is resident and the memory in use has been compared with what was stated."""
        if self._settling is not None:
            self._settling.wait()

    def reset(self) -> None:
        """Forget all sequences; what is in the KV cache stays."""
        if self._loaded is not None:
            self._loaded.batch.reset()

    def execute(self, step: StepInput) -> StepResult:
        """Run one step: apply the difference, compute, sample, append.

        Raises:
            WorkerLost: another rank of the group is gone.
        """
        if self._loaded is None:
            raise InternalError("A step came before the model was loaded.")
        try:
            return self._execute(self._loaded, step)
        except Exception:
            # The other ranks would wait for this one, which is not where they are.
            self._loaded.group.leave()
            raise

    @torch.inference_mode()
    def _execute(self, loaded: _Loaded, step: StepInput) -> StepResult:
        started, waited_before = time.perf_counter(), loaded.model.exchange_wait_seconds
        if len(step.copy_source_block_ids):
            loaded.cache.copy_blocks(
                torch.from_numpy(step.copy_source_block_ids), torch.from_numpy(step.copy_target_block_ids)
            )
        prepared = loaded.batch.prepare(step, loaded.admit)
        sampled, num_computed_tokens, work = SampledTokens.none(), 0, None
        if prepared.batch is None:
            # A step without work is a question for a sign of life, and this rank's answer speaks for all.
            loaded.group.meet()
        else:
            sampled, num_computed_tokens = loaded.compute(prepared.batch), len(prepared.batch.token_ids)
            work = loaded.work.work_of(prepared.batch)
        return StepResult.of(
            step,
            sampled,
            prepared.failed_sequences,
            num_computed_tokens=num_computed_tokens,
            duration_seconds=time.perf_counter() - started,
            exchange_wait_seconds=loaded.model.exchange_wait_seconds - waited_before,
            work=work,
        )

    def _membership(
        self, request: LoadRequest, config: ModelConfig, model: ForwardPass, plan: KVCachePlan
    ) -> Membership:
        shape = hashlib.sha256(repr(config).encode()).hexdigest()[:12]
        return Membership(
            group_id=request.group_id,
            rank=request.rank,
            layout=ExchangeLayout(
                num_ranks=request.tensor_parallel_size,
                max_num_tokens=request.max_num_batched_tokens,
                max_head_rows=MAX_ROWS_AT_A_TIME,
                hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
            ),
            contract=f"{self._config.model} ({shape}) in {self._config.dtype}, quantization "
            f"{self._config.quantization}, by {model.kernels} kernels",
            num_blocks=plan.num_blocks,
            exchange_timeout_seconds=self._config.exchange_timeout_seconds,
        )

    def _state_memory(self, request: LoadRequest, config: ModelConfig) -> MemoryStatement:
        """Say what loading is going to take; raises ModelLoadFailed when that is more than there is."""
        memory, weights_bytes = measure_memory(), config.num_parameters * self._weight_dtype.itemsize
        _require_memory_for_weights(weights_bytes, self._weight_dtype, memory)
        beside_weights = dataclasses.replace(memory, available_bytes=memory.available_bytes - weights_bytes)
        # An earlier load may have left memory behind that this one would seem to give back.
        give_back_freed_memory()
        statement = MemoryStatement(
            before_bytes=measure_memory_in_use().resident_bytes,
            weights_bytes=weights_bytes,
            kv_cache_bytes=self._plan_cache(request, config, beside_weights).size_bytes,
            workspace_bytes=_workspace_bytes(
                min(request.max_num_batched_tokens, MAX_WARM_TOKENS),
                min(request.max_num_seqs, MAX_WARM_SEQUENCES),
                config,
                self._dtype,
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

    @property
    def _weight_dtype(self) -> torch.dtype:
        return torch.int8 if self._config.quantization is Quantization.INT8 else self._dtype

    @torch.inference_mode()
    def _warm_up(self, plan: WarmUp) -> None:
        assert self._loaded is not None, "nothing is loaded that could be warmed up"
        for step in plan.steps:
            self.execute(step)
        self._loaded.batch.reset()
        self._loaded.cache.clear_slots(torch.from_numpy(plan.written_slots))

    def _plan_cache(self, request: LoadRequest, config: ModelConfig, memory: MemoryState) -> KVCachePlan:
        return plan_kv_cache(
            config,
            block_size=request.block_size,
            dtype=self._dtype,
            budget=CacheBudget(
                requested_bytes=self._config.requested_kv_cache_bytes,
                fraction=self._config.kv_cache_memory_fraction,
                limit_bytes=parse_size(self._config.kv_cache_memory_limit),
            ),
            memory=memory,
            reserved_bytes=_SLACK_BYTES
            + _workspace_bytes(request.max_num_batched_tokens, request.max_num_seqs, config, self._dtype),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """What exists from loading on."""

    model: ForwardPass
    cache: KVCache
    batch: InputBatch
    sampler: Sampler
    prompt_scorer: PromptScorer
    matchers: Matchers
    work: WorkCounter
    group: RankGroup

    def close(self) -> None:
        """Give up what others hold for this model."""
        self.matchers.close()
        self.group.leave()

    def admit(self, sequence: NewSequence) -> None:
        """Take a new sequence's sampling parameters; raises InvalidRequest for those that do not fit the model."""
        self.sampler.add(
            sequence.slot, sequence.sampling_params, sequence.choice_index, self.matchers.matcher_of(sequence)
        )
        self.prompt_scorer.add(sequence.slot, sequence.sampling_params)

    def compute(self, batch: FlatBatch) -> SampledTokens:
        """Run the forward pass and choose tokens for each sequence whose last known token was computed."""
        self.group.begin_batch(batch)
        forwarded = self.model.run(batch)
        self.group.end_batch()
        prompts = self.prompt_scorer.measure(forwarded, batch, self.batch)
        is_finite = forwarded.is_finite & prompts.is_measured
        failed = [] if is_finite.all() else self._fail_sequences(batch, ~is_finite)
        is_sampled = batch.is_sampled & is_finite
        slots = batch.slots[is_sampled]
        num_tokens = token_ids = np.empty(0, dtype=np.int64)
        logprobs = OutputLogprobs.none()
        if len(slots):
            sampled = sample_sequences(
                self.sampler, self.batch, forwarded.logits(is_sampled), slots, batch.num_drafts[is_sampled]
            )
            has_tokens = sampled.num_tokens > 0
            failed += [
                self._fail_row(slot, status)
                for slot, status in zip(
                    slots[~has_tokens].tolist(), sampled.statuses[~has_tokens].tolist(), strict=True
                )
            ]
            slots, num_tokens, token_ids = slots[has_tokens], sampled.num_tokens[has_tokens], sampled.token_ids
            slot_of_token = np.repeat(slots, num_tokens)
            logprobs = OutputLogprobs(slot_of_token[self.sampler.wants_logprobs(slot_of_token)], sampled.logprobs)
        self.batch.commit(batch, slots, num_tokens, token_ids)
        return SampledTokens(slots, num_tokens, token_ids, tuple(failed), logprobs, prompts.logprobs)

    def _fail_row(self, slot: int, status: RowStatus) -> FailedSequence:
        if status == RowStatus.NO_TOKEN_LEFT:
            return self.batch.fail(slot, SequenceFailure.NO_TOKEN_LEFT, _NO_TOKEN_LEFT)
        return self.batch.fail(slot, SequenceFailure.INVALID_LOGITS, _NOT_NUMBERS)

    def _fail_sequences(self, batch: FlatBatch, is_failed: NDArray[np.bool_]) -> list[FailedSequence]:
        """Fail sequences whose hidden states are not finite, and take what they wrote out of the cache."""
        slots_written = batch.slot_mapping[batch.rows_of(is_failed)]
        self.cache.clear_slots(torch.from_numpy(slots_written))
        return [
            self.batch.fail(slot, SequenceFailure.INVALID_LOGITS, _NOT_NUMBERS)
            for slot in batch.slots[is_failed].tolist()
        ]


def _make_cache(model: ForwardPass, plan: KVCachePlan, group: RankGroup) -> KVCache:
    """Allocate the cache that all ranks have room for, and join them; the group is left when that fails."""
    try:
        cache = model.make_cache(dataclasses.replace(plan, num_blocks=group.num_blocks))
        if group.exchange is not None:
            model.join(group.exchange)
    except Exception:
        group.leave()
        raise
    return cache


def _require_memory_for_weights(needed_bytes: int, kept_as: torch.dtype, memory: MemoryState) -> None:
    if needed_bytes > memory.available_bytes:
        raise ModelLoadFailed(
            f"The weights take {needed_bytes} bytes as {kept_as}, but only {memory.available_bytes} bytes of "
            "memory are available; free some or serve a smaller model."
        )


def _max_model_len(request: LoadRequest, model_limit: int) -> int:
    if request.max_model_len is not None and request.max_model_len > model_limit:
        raise ModelLoadFailed(
            f"max_model_len was asked to be {request.max_model_len} tokens, but the model's own limit is "
            f"{model_limit}."
        )
    return request.max_model_len or model_limit


def _workspace_bytes(num_tokens: int, num_sampled: int, config: ModelConfig, dtype: torch.dtype) -> int:
    """Estimate what a step of that size allocates: activations of one layer, and logits."""
    num_values_per_token = 12 * config.hidden_size + 4 * config.intermediate_size
    activations = num_tokens * num_values_per_token * dtype.itemsize
    # Logits exist in the model's dtype and in fp32, and once more as scores.
    num_rows = num_sampled + MAX_ROWS_AT_A_TIME
    logits = num_rows * config.vocab_size * (dtype.itemsize + 2 * torch.float32.itemsize)
    return activations + logits
