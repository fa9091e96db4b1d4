"""The Llama architecture over the paged KV cache.

Owns the order of its operations and which tensors it needs. It must not know how a step came about or how tokens
are chosen. One forward pass takes a flat batch of tokens from any mix of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.kv_cache import KVCache
from services.worker.layers.attention import AttentionGroup, PagedAttention, StepLayout
from services.worker.layers.linear import Linear, make_linear
from services.worker.layers.rotary import rotary_frequencies, rotate, rotation_of
from services.worker.layers.threads import OperatorThreads
from services.worker.weights import ModelConfig, WeightReader


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


class LlamaModel:
    """The weights of one model and their forward pass."""

    def __init__(
        self, config: ModelConfig, reader: WeightReader, dtype: torch.dtype, threads: OperatorThreads
    ) -> None:
        self.config = config
        self._threads = threads
        self._frequencies = rotary_frequencies(config)
        self._attention = PagedAttention(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype
        )
        self._embedding = reader.read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [
            _LlamaLayer(config, reader, f"model.layers.{index}", self._attention, threads)
            for index in range(config.num_layers)
        ]
        self._final_norm = reader.read("model.norm.weight", config.hidden_size)
        if config.has_tied_embeddings:
            reader.skip("lm_head.weight")
            self._head = make_linear(self._embedding)
        else:
            self._head = make_linear(reader.read("lm_head.weight", config.vocab_size, config.hidden_size))
        reader.finish()

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute all tokens of the batch, writing their keys and values; returns ``[num_tokens, hidden_size]``."""
        self._threads.begin_step(len(batch.token_ids), int(batch.layout.context_lens.sum()))
        groups = self._attention.plan(batch.layout)
        rotation = _Rotation(*rotation_of(batch.positions, self._frequencies))
        hidden = F.embedding(batch.token_ids, self._embedding)
        for layer, layer_cache in zip(self._layers, cache.layers, strict=True):
            hidden = layer.forward(hidden, rotation, batch.slot_mapping, layer_cache, groups)
        hidden = F.rms_norm(hidden, (self.config.hidden_size,), self._final_norm, self.config.rms_norm_eps)
        self._threads.end_step()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Map ``[num_rows, hidden_size]`` to ``[num_rows, vocab_size]`` in fp32."""
        return self._head(hidden).float()


class _LlamaLayer:
    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        prefix: str,
        attention: PagedAttention,
        threads: OperatorThreads,
    ) -> None:
        self._config = config
        self._threads = threads
        self._attention = attention
        self._query_size = config.num_heads * config.head_dim
        self._kv_size = config.num_kv_heads * config.head_dim
        size, inner = config.hidden_size, config.intermediate_size
        self._attention_norm = reader.read(f"{prefix}.input_layernorm.weight", size)
        self._qkv = _read_joined(
            reader,
            size,
            {
                f"{prefix}.self_attn.q_proj.weight": self._query_size,
                f"{prefix}.self_attn.k_proj.weight": self._kv_size,
                f"{prefix}.self_attn.v_proj.weight": self._kv_size,
            },
        )
        self._output = make_linear(reader.read(f"{prefix}.self_attn.o_proj.weight", size, self._query_size))
        self._mlp_norm = reader.read(f"{prefix}.post_attention_layernorm.weight", size)
        self._gate_up = _read_joined(
            reader, size, {f"{prefix}.mlp.gate_proj.weight": inner, f"{prefix}.mlp.up_proj.weight": inner}
        )
        self._down = make_linear(reader.read(f"{prefix}.mlp.down_proj.weight", size, inner))

    def forward(
        self,
        hidden: Tensor,
        rotation: _Rotation,
        slot_mapping: Tensor,
        cache: Tensor,
        groups: list[AttentionGroup],
    ) -> Tensor:
        hidden = hidden + self._attend(
            self._norm(hidden, self._attention_norm), rotation, slot_mapping, cache, groups
        )
        return hidden + self._feed_forward(self._norm(hidden, self._mlp_norm))

    def _attend(
        self, x: Tensor, rotation: _Rotation, slot_mapping: Tensor, cache: Tensor, groups: list[AttentionGroup]
    ) -> Tensor:
        with self._threads:
            qkv = self._qkv(x)  # [num_tokens, query_size + 2 * kv_size]
        rotated_size = self._query_size + self._kv_size
        heads = qkv[:, :rotated_size].view(len(qkv), -1, self._config.head_dim)
        rotated = rotate(heads, rotation.cosine, rotation.signed_sine)
        qkv[:, self._query_size : rotated_size] = rotated[:, self._config.num_heads :].flatten(1)
        cache.view(-1, 2 * self._kv_size).index_copy_(0, slot_mapping, qkv[:, self._query_size :])
        with self._threads:
            return self._output(self._attention.attend(rotated[:, : self._config.num_heads], cache, groups))

    def _feed_forward(self, x: Tensor) -> Tensor:
        with self._threads:
            gate, up = self._gate_up(x).chunk(2, -1)
        inner = F.silu(gate).mul_(up)
        with self._threads:
            return self._down(inner)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        # torch computes this in fp32 whatever the dtype is.
        return F.rms_norm(hidden, (self._config.hidden_size,), weight, self._config.rms_norm_eps)


def _read_joined(reader: WeightReader, num_inputs: int, rows_by_name: dict[str, int]) -> Linear:
    """Read several weights that have the same input as one."""
    return make_linear(torch.cat([reader.read(name, rows, num_inputs) for name, rows in rows_by_name.items()]))
