"""A model on its way from files to a ServedModel: one object for each load, one method for each stage.

Owns what exists only while loading. It must not run steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from libs.errors import ModelLoadFailed
from libs.text import ModelText, load_model_text, resolve_model_path
from services.worker.config import WorkerConfig
from services.worker.exchange import ExchangeLayout
from services.worker.forward_pass import ForwardPass, load_forward_pass, make_row_sampler
from services.worker.input_batch import BatchLimits, InputBatch
from services.worker.kv_cache import KVCache, KVCachePlan, measure_memory
from services.worker.memory_plan import MemoryPlan
from services.worker.models.shard import ModelShard, plan_shard
from services.worker.prompt_logprobs import MAX_ROWS_AT_A_TIME, PromptScorer
from services.worker.rank_group import FormGroup, Membership, RankGroup
from services.worker.sampler import Sampler
from services.worker.served_model import Matchers, ServedModel
from services.worker.step import LoadedModel, LoadProgress, LoadRequest
from services.worker.step_work import MachineLimits
from services.worker.weight_files import open_weights
from services.worker.weights import ModelConfig, WeightReader, WeightSource
from services.worker.work_counter import WorkCounter

ReportProgress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class ModelLoading:
    """One load: what was asked for, and what the model's files say."""

    config: WorkerConfig
    request: LoadRequest
    on_progress: ReportProgress
    text: ModelText
    source: WeightSource
    shard: ModelShard
    memory: MemoryPlan
    max_model_len: int

    @staticmethod
    def begin(config: WorkerConfig, request: LoadRequest, on_progress: ReportProgress) -> ModelLoading:
        """Read the model's description; raises ModelLoadFailed when it cannot be served as it was asked for."""
        path = resolve_model_path(config.model)
        text, source = load_model_text(path), open_weights(path)
        shard = plan_shard(source.config, request.rank, request.tensor_parallel_size)
        return ModelLoading(
            config,
            request,
            on_progress,
            text,
            source,
            shard,
            MemoryPlan(config, request, shard.config_of(source.config)),
            _max_model_len(request, min(text.max_model_len, source.config.max_position)),
        )

    def read_weights(self) -> ForwardPass:
        """Read this rank's share of the weights; raises ModelLoadFailed."""
        reader = WeightReader(
            self.source,
            self.memory.dtype,
            lambda done, total: self.on_progress(LoadProgress("reading weights", done, total)),
        )
        return load_forward_pass(
            self.config.kernels,
            self.source.config,
            reader,
            dtype=self.memory.dtype,
            block_size=self.request.block_size,
            num_threads=self.config.num_threads_used,
            quantization=self.config.quantization,
            shard=self.shard,
        )

    def join_others(self, model: ForwardPass, form_group: FormGroup) -> tuple[RankGroup, KVCache]:
        """Form the group of ranks and allocate the cache that all of them have room for; raises ModelLoadFailed."""
        self.tell("allocating the KV cache")
        plan = self.memory.plan_cache(measure_memory())
        membership = self._membership(model, plan)
        group = form_group(membership, lambda: self.tell("waiting for the other ranks"))
        try:
            cache = model.make_cache(dataclasses.replace(plan, num_blocks=group.num_blocks))
            if group.exchange is not None:
                model.join(group.exchange)
        except Exception:
            group.leave()
            raise
        return group, cache

    def put_together(self, model: ForwardPass, group: RankGroup, cache: KVCache, matchers: Matchers) -> ServedModel:
        """Make what a step needs beside the weights and the cache."""
        limits = BatchLimits(
            max_num_seqs=self.request.max_num_seqs,
            # No sequence is longer than the cache, however long the model's own context is.
            max_model_len=min(self.max_model_len, cache.plan.num_blocks * self.request.block_size),
            max_num_batched_tokens=self.request.max_num_batched_tokens,
            num_blocks=cache.plan.num_blocks,
            block_size=self.request.block_size,
            vocab_size=self.source.config.vocab_size,
        )
        row_sampler = make_row_sampler(
            self.config.kernels,
            model,
            vocab_size=limits.vocab_size,
            num_threads=self.config.num_threads_used,
        )
        return ServedModel(
            limits,
            model,
            cache,
            InputBatch(limits),
            Sampler(
                max_num_seqs=limits.max_num_seqs,
                vocab_size=limits.vocab_size,
                # A tokenizer may have more tokens than the model, and an end token among those never comes.
                eos_token_ids=[each for each in self.text.eos_token_ids if each < limits.vocab_size],
                row_sampler=row_sampler,
            ),
            PromptScorer(row_sampler, max_num_seqs=limits.max_num_seqs),
            matchers,
            WorkCounter(
                dataclasses.replace(self.memory.model, vocab_size=self.shard.head_rows.size),
                model.weight_sizes,
                kv_value_bytes=self.memory.dtype.itemsize,
            ),
            group,
        )

    def describe(self, served: ServedModel, machine_limits: MachineLimits | None) -> LoadedModel:
        """Say what was loaded."""
        limits = served.limits
        return LoadedModel(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=self.text.eos_token_ids,
            tokenizer_digest=self.text.tokenizer_digest,
            vocab_size=limits.vocab_size,
            gpu_type="CPU",
            total_vram_bytes=measure_memory().total_bytes,
            kv_cache_bytes=served.cache.plan.size_bytes,
            weights_bytes=served.model.weight_bytes,
            limits=machine_limits,
        )

    def tell(self, stage: str) -> None:
        """Report a stage that comes when all weights are read."""
        num_bytes = sum(self.source.sizes_bytes.values())
        self.on_progress(LoadProgress(stage, num_bytes, num_bytes))

    def _membership(self, model: ForwardPass, plan: KVCachePlan) -> Membership:
        whole: ModelConfig = self.source.config
        shape = hashlib.sha256(repr(whole).encode()).hexdigest()[:12]
        return Membership(
            group_id=self.request.group_id,
            rank=self.request.rank,
            layout=ExchangeLayout(
                num_ranks=self.request.tensor_parallel_size,
                max_num_tokens=self.request.max_num_batched_tokens,
                max_head_rows=MAX_ROWS_AT_A_TIME,
                hidden_size=whole.hidden_size,
                vocab_size=whole.vocab_size,
            ),
            contract=f"{self.config.model} ({shape}) in {self.config.dtype}, quantization "
            f"{self.config.quantization}, by {model.kernels} kernels",
            num_blocks=plan.num_blocks,
            exchange_timeout_seconds=self.config.exchange_timeout_seconds,
        )


def _max_model_len(request: LoadRequest, model_limit: int) -> int:
    if request.max_model_len is not None and request.max_model_len > model_limit:
        raise ModelLoadFailed(
            f"max_model_len was asked to be {request.max_model_len} tokens, but the model's own limit is "
            f"{model_limit}."
        )
    return request.max_model_len or model_limit
