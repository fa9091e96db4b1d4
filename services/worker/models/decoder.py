"""A described model in torch over the paged KV cache.

Owns how torch executes each operation of a description. It must not know architectures, how a step came about or
how tokens are chosen. One forward pass takes a flat batch of tokens from any mix of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.exchange import Exchange
from services.worker.kv_cache import KVCache
from services.worker.layers.attention import AttentionGroup, PagedAttention, StepLayout
from services.worker.layers.linear import Linear, make_linear
from services.worker.layers.rotary import rotary_amplitude, rotary_frequencies, rotate, rotation_of
from services.worker.layers.threads import OperatorThreads
from services.worker.models.description import Activation, Attention, FeedForward, Norm, Projection
from services.worker.models.parameters import read_bias, read_norm, read_weight
from services.worker.models.shard import ModelShard, describe_shard, plan_shard
from services.worker.weights import ModelConfig, Rotary, WeightReader

_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The tokens of one step, one after the other."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64: where each token's keys and values go
    layout: StepLayout


@dataclass(frozen=True, slots=True, eq=False)
class _Rotation:
    cosine: Tensor
    signed_sine: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What the attentions of a step share, each in as many kinds as the model has."""

    slot_mapping: Tensor
    rotations: Mapping[Rotary, _Rotation]
    groups: Mapping[int | None, list[AttentionGroup]]  # by window


class Decoder:
    """The weights of one model and their forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        dtype: torch.dtype,
        threads: OperatorThreads,
        shard: ModelShard | None = None,
    ) -> None:
        """Read the weights of the model that ``config`` is about, or of one rank's part of it."""
        shard = shard or plan_shard(config, 0, 1)
        description = describe_shard(config, shard)
        config = shard.config_of(config)
        self._threads = threads
        self._exchange: Exchange | None = None
        self._frequencies = {rotary: rotary_frequencies(rotary, config.head_dim) for rotary in description.rotaries}
        self._attention = PagedAttention(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype
        )
        self._windows = {item.window for item in description.operations if isinstance(item, Attention)}
        self._embedding = read_weight(reader, description.embedding)
        self._embedding_scale = description.embedding_scale
        self._operations = [
            _AttentionLayer(config, operation, reader, self._attention, threads)
            if isinstance(operation, Attention)
            else _FeedForwardLayer(config, operation, reader, threads)
            for operation in description.operations
        ]
        self._final_norm = _RmsNorm(config, description.final_norm, reader)
        self._first_head_row = description.head_rows.first
        self._head = make_linear(
            self._embedding[description.head_rows.first : description.head_rows.end].contiguous()
            if description.head is None
            else read_weight(reader, description.head)
        )
        for name in description.unused:
            reader.skip(name)
        reader.finish()

    def join(self, exchange: Exchange) -> None:
        """Put results together with those of the other ranks, which must run the same batches."""
        self._exchange = exchange

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute all tokens of the batch, writing their keys and values; returns ``[num_tokens, hidden_size]``."""
        self._threads.begin_step(len(batch.token_ids), int(batch.layout.context_lens.sum()))
        step = self._begin(batch)
        hidden = F.embedding(batch.token_ids, self._embedding) * self._embedding_scale
        layer_caches = iter(cache.layers)
        for operation in self._operations:
            if isinstance(operation, _AttentionLayer):
                produced = self._summed(operation.forward(hidden, step, next(layer_caches)))
            else:
                produced = self._summed(operation.forward(hidden))
            hidden = hidden + operation.norm_after(produced)
        hidden = self._final_norm(hidden)
        self._threads.end_step()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Map ``[num_rows, hidden_size]`` to ``[num_rows, vocab_size]`` in fp32."""
        logits = self._head(hidden).float()
        if self._exchange is None:
            return logits
        return torch.from_numpy(self._exchange.gather_columns(logits.numpy(), self._first_head_row))

    def _summed(self, part: Tensor) -> Tensor:
        """Return what all ranks have produced together."""
        if self._exchange is None:
            return part
        return torch.from_numpy(self._exchange.add(part.float().numpy())).to(part.dtype)

    def _begin(self, batch: ForwardBatch) -> _Step:
        return _Step(
            slot_mapping=batch.slot_mapping,
            rotations={
                rotary: _Rotation(*rotation_of(batch.positions, frequencies, rotary_amplitude(rotary)))
                for rotary, frequencies in self._frequencies.items()
            },
            groups={window: self._attention.plan(batch.layout, window) for window in self._windows},
        )


class _AttentionLayer:
    def __init__(
        self,
        config: ModelConfig,
        operation: Attention,
        reader: WeightReader,
        attention: PagedAttention,
        threads: OperatorThreads,
    ) -> None:
        self._threads = threads
        self._attention = attention
        self._operation = operation
        self._num_heads = config.num_heads
        self._head_dim = config.head_dim
        self._query_size, self._kv_size = operation.query.num_outputs, operation.key.num_outputs
        self._norm = _RmsNorm(config, operation.norm, reader)
        self._qkv = _Map(reader, operation.query, operation.key, operation.value)
        self._query_norm = _optional_norm(config, operation.query_norm, reader)
        self._key_norm = _optional_norm(config, operation.key_norm, reader)
        self._output = _Map(reader, operation.output)
        self.norm_after = _norm_after(config, operation.norm_after, reader)

    def forward(self, hidden: Tensor, step: _Step, cache: Tensor) -> Tensor:
        """Return what is added to the residual stream, before it is normed; of a rank a part of it."""
        normed = self._norm(hidden)
        with self._threads:
            qkv = self._qkv(normed)  # [num_tokens, query_size + 2 * kv_size]
        queries = self._rotated(qkv[:, : self._query_size], self._query_norm, step)
        keys = self._rotated(qkv[:, self._query_size : self._query_size + self._kv_size], self._key_norm, step)
        qkv[:, self._query_size : self._query_size + self._kv_size] = keys.flatten(1)
        cache.view(-1, 2 * self._kv_size).index_copy_(0, step.slot_mapping, qkv[:, self._query_size :])
        with self._threads:
            attended = self._attention.attend(
                queries, cache, step.groups[self._operation.window], self._operation.scale
            )
            return self._output(attended)

    def _rotated(self, projected: Tensor, norm: _RmsNorm | None, step: _Step) -> Tensor:
        heads = projected.view(len(projected), -1, self._head_dim)
        rotation = step.rotations[self._operation.rotary]
        return rotate(heads if norm is None else norm(heads), rotation.cosine, rotation.signed_sine)


class _FeedForwardLayer:
    def __init__(
        self, config: ModelConfig, operation: FeedForward, reader: WeightReader, threads: OperatorThreads
    ) -> None:
        self._threads = threads
        self._activation = _ACTIVATIONS[operation.activation]
        self._norm = _RmsNorm(config, operation.norm, reader)
        self._gate_up = _Map(reader, operation.gate, operation.up)
        self._down = _Map(reader, operation.down)
        self.norm_after = _norm_after(config, operation.norm_after, reader)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what is added to the residual stream, before it is normed; of a rank a part of it."""
        normed = self._norm(hidden)
        with self._threads:
            gate, up = self._gate_up(normed).chunk(2, -1)
        inner = self._activation(gate).mul_(up)
        with self._threads:
            return self._down(inner)


class _Map:
    """Projections of one input, computed as one."""

    def __init__(self, reader: WeightReader, *projections: Projection) -> None:
        self._linear: Linear = make_linear(torch.cat([read_weight(reader, item) for item in projections]))
        biases = [read_bias(reader, item) for item in projections if item.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        mapped = self._linear(x)
        return mapped if self._bias is None else mapped.add_(self._bias)


class _RmsNorm:
    def __init__(self, config: ModelConfig, norm: Norm, reader: WeightReader) -> None:
        self._weight = read_norm(reader, norm)  # fp32
        self._eps = config.rms_norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        # In fp32 to the end, whatever the dtype is: weights near one have few bits left beside it.
        return F.rms_norm(x.float(), self._weight.shape, self._weight, self._eps).to(x.dtype)


def _norm_after(config: ModelConfig, norm: Norm | None, reader: WeightReader) -> Callable[[Tensor], Tensor]:
    return _unchanged if norm is None else _RmsNorm(config, norm, reader)


def _unchanged(produced: Tensor) -> Tensor:
    return produced


def _optional_norm(config: ModelConfig, norm: Norm | None, reader: WeightReader) -> _RmsNorm | None:
    return None if norm is None else _RmsNorm(config, norm, reader)
