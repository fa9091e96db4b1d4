"""A model in native code: its description turned into a plan, and a step as one call.

Owns handing over weights and arrays. It must not know how the kernels compute or how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.errors import InternalError
from libs.obs import get_logger
from services.worker.config import Quantization
from services.worker.exchange import Exchange
from services.worker.input_batch import FlatBatch
from services.worker.kernels.cpu.cache import TILE_TOKENS, TiledKVCache
from services.worker.kernels.cpu.extension import (
    Bfloat16Bits,
    Extension,
    FloatVector,
    NativeCollective,
    NativeModel,
)
from services.worker.kv_cache import KVCache, KVCachePlan
from services.worker.layers.rotary import rotary_amplitude, rotary_frequencies
from services.worker.models.description import Activation, Attention, FeedForward, Norm, Projection
from services.worker.models.parameters import read_bias, read_norm, read_weight
from services.worker.models.shard import ModelShard, describe_shard, plan_shard
from services.worker.step_work import MachineLimits
from services.worker.weights import ModelConfig, WeightReader
from services.worker.work_counter import WeightSizes

_log = get_logger("native_kernels")

_HEAD_MULTIPLE = 32
_PROBE_BYTES = 256 * 2**20
_PROBE_ROUNDS = 3


def reason_against(
    extension: Extension | None, config: ModelConfig, *, dtype: torch.dtype, block_size: int
) -> str | None:
    """Say why native code cannot serve this model here, or None when it can."""
    if dtype is not torch.bfloat16:
        return "they compute in bfloat16 only"
    if config.head_dim % _HEAD_MULTIPLE:
        return f"heads of {config.head_dim} values are no multiple of {_HEAD_MULTIPLE}"
    if block_size % TILE_TOKENS:
        return f"blocks of {block_size} tokens are no multiple of {TILE_TOKENS}"
    if extension is None:
        return "they are not built; run python -m services.worker.kernels.cpu.build"
    return None


class NativeForwardPass:
    """The forward pass of one model, in one native call a step."""

    def __init__(
        self,
        extension: Extension,
        config: ModelConfig,
        reader: WeightReader,
        *,
        block_size: int,
        num_threads: int,
        kernels: str = "",
        quantization: Quantization = Quantization.NONE,
        shard: ModelShard | None = None,
    ) -> None:
        """Load the model that ``config`` is about, or one rank's part of it."""
        shard = shard or plan_shard(config, 0, 1)
        self._extension = extension
        self._exchange: Exchange | None = None
        self._collective: NativeCollective | None = None
        self._config = shard.config_of(config)
        self._quantization = quantization
        self._model, self._weight_sizes = _load(
            extension,
            config,
            reader,
            block_size=block_size,
            num_threads=num_threads,
            kernels=kernels,
            quantization=quantization,
            shard=shard,
        )
        # Kept from step to step: to touch new memory costs more than to fill it.
        self._logits = np.empty((0, config.vocab_size), dtype=np.float32)
        self._row_logits = np.empty((0, config.vocab_size), dtype=np.float32)
        _log.info(
            "native kernels ready",
            kernels=self._model.kernels,
            num_threads=num_threads,
            quantization=quantization.value,
            weight_bytes=self._model.weight_bytes,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are kept."""
        return self._model.weight_bytes

    @property
    def kernels(self) -> str:
        """Name of the instruction set in use."""
        return self._model.kernels

    @property
    def native_model(self) -> NativeModel:
        """The native side, for probes of the machine."""
        return self._model

    @property
    def weight_sizes(self) -> WeightSizes:
        """Bytes of the packed weights."""
        return self._weight_sizes

    def measure_limits(self) -> MachineLimits:
        """Measure how fast all threads read the weights and multiply; takes some hundredths of a second."""
        return MachineLimits(
            bytes_per_second=self._model.weight_bandwidth(_PROBE_BYTES, _PROBE_ROUNDS),
            operations_per_second=self._model.multiply_rate(_PROBE_ROUNDS, self._quantization.value),
        )

    def make_cache(self, plan: KVCachePlan) -> KVCache:
        """Allocate the KV cache in the kernels' layout and use it from now on."""
        cache = TiledKVCache(self._config, plan)
        self._model.bind_cache(cache.native_layers())
        # The native model keeps addresses only.
        self._cache = cache
        return cache

    def join(self, exchange: Exchange) -> None:
        """Compute together with the other ranks from now on; logits are read where all ranks write them."""
        self._exchange = exchange
        self._collective = self._extension.NativeCollective(
            memory=exchange.memory,
            rank=exchange.rank,
            num_ranks=exchange.layout.num_ranks,
            parts_offset=exchange.layout.parts_offset,
            part_bytes=exchange.layout.part_bytes,
            timeout_seconds=exchange.timeout_seconds,
        )
        self._model.join(self._collective)
        self._logits, self._row_logits = exchange.step_logits, exchange.head_logits

    @property
    def exchange_wait_seconds(self) -> float:
        """Time that steps have waited for other ranks."""
        return 0.0 if self._collective is None else self._collective.wait_seconds

    def run(self, batch: FlatBatch) -> NativeForwarded:
        """Compute all tokens of the batch; raises WorkerLost when another rank is lost."""
        is_finite = np.empty(len(batch.token_ids), dtype=np.uint8)
        sampled_rows = batch.sampled_rows
        self._logits = self._with_room(self._logits, len(sampled_rows))
        logits = self._logits[: len(sampled_rows)]
        self._model.forward(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            num_queries=batch.num_queries,
            block_tables=np.ascontiguousarray(batch.block_tables),
            sampled_rows=sampled_rows,
            logits=logits,
            is_finite=is_finite,
        )
        self._raise_if_broken()
        by_sequence: NDArray[np.bool_] = np.logical_and.reduceat(is_finite.view(np.bool_), batch.first_rows)
        return NativeForwarded(is_finite=by_sequence, batch=batch, sampled_logits=logits, head=self._head)

    def _head(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        self._row_logits = self._with_room(self._row_logits, len(rows))
        logits = self._row_logits[: len(rows)]
        self._model.head(rows=rows, logits=logits)
        self._raise_if_broken()
        return logits

    def _with_room(self, logits: NDArray[np.float32], num_rows: int) -> NDArray[np.float32]:
        if num_rows <= len(logits):
            return logits
        if self._exchange is not None:
            raise InternalError(f"The ranks share {len(logits)} rows of logits, but {num_rows} are needed.")
        return np.empty((num_rows, self._config.vocab_size), dtype=np.float32)

    def _raise_if_broken(self) -> None:
        if self._collective is not None and self._exchange is not None and self._collective.is_broken:
            self._exchange.raise_if_broken()


@dataclass(frozen=True, slots=True, eq=False)
class NativeForwarded:
    """What a step gave."""

    is_finite: NDArray[np.bool_]  # [num_seqs]
    batch: FlatBatch
    sampled_logits: NDArray[np.float32]  # [number of sampled rows, vocab_size]

    head: Callable[[NDArray[np.int64]], NDArray[np.float32]]

    def logits(self, is_chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return the logits of the sampled rows of some of the sampled sequences."""
        if is_chosen[self.batch.is_sampled].all():
            return self.sampled_logits
        return self.sampled_logits[np.isin(self.batch.sampled_rows, self.batch.sampled_rows_of(is_chosen))]

    def row_logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute the logits of any rows of the step, which must be the last one."""
        return self.head(rows)


def _load(
    extension: Extension,
    config: ModelConfig,
    reader: WeightReader,
    *,
    block_size: int,
    num_threads: int,
    kernels: str,
    quantization: Quantization,
    shard: ModelShard,
) -> tuple[NativeModel, WeightSizes]:
    """Turn the description of a rank's part into a plan, packing each weight as it is read."""
    description = describe_shard(config, shard)
    config = shard.config_of(config)
    rotaries = description.rotaries
    model = extension.NativeModel(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        block_size=block_size,
        rms_norm_eps=config.rms_norm_eps,
        frequencies=torch.stack([rotary_frequencies(rotary, config.head_dim) for rotary in rotaries]).numpy(),
        amplitudes=np.array([rotary_amplitude(rotary) for rotary in rotaries], dtype=np.float32),
        num_threads=num_threads,
        kernels=kernels,
        quantization=quantization.value,
    )
    parameters = _Parameters(reader)
    model.set_embedding(parameters.weight(description.embedding), description.embedding_scale)
    embedding_bytes = model.weight_bytes
    for operation in description.operations:
        if isinstance(operation, Attention):
            _add_attention(model, operation, rotaries.index(operation.rotary), parameters)
        else:
            _add_feed_forward(model, operation, extension, parameters)
    layers_bytes = model.weight_bytes - embedding_bytes
    head = None if description.head is None else parameters.weight(description.head)
    rows = description.head_rows
    model.set_head(parameters.norm(description.final_norm), head, rows.first, rows.size)
    for name in description.unused:
        reader.skip(name)
    reader.finish()
    # A head of its own was packed last; otherwise the embedding is read as the head.
    head_bytes = (
        model.weight_bytes - layers_bytes - embedding_bytes
        if head is not None
        else embedding_bytes * rows.size // config.vocab_size
    )
    return model, WeightSizes(layers_bytes=layers_bytes, head_bytes=head_bytes)


def _add_attention(model: NativeModel, operation: Attention, rotation: int, parameters: _Parameters) -> None:
    model.add_attention(
        norm=parameters.norm(operation.norm),
        query=parameters.weight(operation.query),
        key=parameters.weight(operation.key),
        value=parameters.weight(operation.value),
        output=parameters.weight(operation.output),
        query_bias=parameters.optional_bias(operation.query),
        key_bias=parameters.optional_bias(operation.key),
        value_bias=parameters.optional_bias(operation.value),
        output_bias=parameters.optional_bias(operation.output),
        query_norm=parameters.optional_norm(operation.query_norm),
        key_norm=parameters.optional_norm(operation.key_norm),
        norm_after=parameters.optional_norm(operation.norm_after),
        rotation=rotation,
        window=operation.window or 0,
        softmax_scale=operation.scale,
    )


def _add_feed_forward(
    model: NativeModel, operation: FeedForward, extension: Extension, parameters: _Parameters
) -> None:
    activations = {
        Activation.SILU: extension.Activation.SILU,
        Activation.GELU_TANH: extension.Activation.GELU_TANH,
    }
    model.add_feed_forward(
        norm=parameters.norm(operation.norm),
        gate=parameters.weight(operation.gate),
        up=parameters.weight(operation.up),
        down=parameters.weight(operation.down),
        activation=activations[operation.activation],
        norm_after=parameters.optional_norm(operation.norm_after),
    )


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Reads parameters as the native side takes them."""

    reader: WeightReader

    def weight(self, projection: Projection) -> Bfloat16Bits:
        return _bits_of(read_weight(self.reader, projection))

    def norm(self, norm: Norm) -> FloatVector:
        return read_norm(self.reader, norm).numpy()

    def optional_norm(self, norm: Norm | None) -> FloatVector | None:
        return None if norm is None else self.norm(norm)

    def optional_bias(self, projection: Projection) -> FloatVector | None:
        return None if projection.bias is None else read_bias(self.reader, projection).numpy()


def _bits_of(tensor: Tensor) -> Bfloat16Bits:
    bits: Bfloat16Bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return bits
