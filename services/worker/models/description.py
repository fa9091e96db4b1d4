"""Models as lists of operations over named weights.

Owns which operations an architecture consists of and how its weights are named. It must not know how an operation
is computed: torch executes the list, and a plan for native code is made from it, so that an architecture of these
operations is a description and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from services.worker.weights import GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3, ModelConfig, Rotary


class Activation(StrEnum):
    """What opens the gate of a feed-forward."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Norm:
    """Values over the root of their mean square, times ``offset + weight``."""

    weight: str
    size: int
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive indices from ``first`` on, without ``end``."""

    first: int
    end: int

    @property
    def size(self) -> int:
        """How many there are."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where the outputs and inputs of a projection lie in a stored weight that has more."""

    first_output: int = 0
    first_input: int = 0
    num_stored_outputs: int
    num_stored_inputs: int


@dataclass(frozen=True, slots=True)
class Projection:
    """The map ``x ↦ x Wᵀ + b``."""

    weight: str
    num_outputs: int
    num_inputs: int
    bias: str | None = None
    part: Part | None = None  # None is the whole of the stored weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Norm, attention with rotary positions over the cache, and the sum with what came in."""

    norm: Norm
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    rotary: Rotary
    scale: float  # of the scores
    window: int | None = None  # how many of the last tokens a token sees, itself included; None is all
    query_norm: Norm | None = None  # of each head, before it is rotated
    key_norm: Norm | None = None
    norm_after: Norm | None = None  # of what is added


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Norm, ``down(activation(gate) * up)``, and the sum with what came in."""

    norm: Norm
    gate: Projection
    up: Projection
    down: Projection
    activation: Activation = Activation.SILU
    norm_after: Norm | None = None  # of what is added


Operation = Attention | FeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The operations of a model in their order; the names are those of its weights."""

    embedding: Projection  # a row for each token of the vocabulary
    operations: tuple[Operation, ...]
    final_norm: Norm
    head: Projection | None  # None when the head is the embedding
    head_rows: Span  # the tokens whose logits are computed: all, or a rank's share of them
    embedding_scale: float = 1.0  # of embeddings that come in, not of the head
    unused: tuple[str, ...] = ()  # what files may carry beside it

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The different rotary positions of the attentions."""
        return tuple(dict.fromkeys(item.rotary for item in self.operations if isinstance(item, Attention)))


def describe(config: ModelConfig) -> ModelDescription:
    """Describe the model that ``config`` is about."""
    return _DESCRIPTIONS[config.architecture](config)


def describe_llama(config: ModelConfig) -> ModelDescription:
    """Describe Llama and what differs from it in configuration or by norms of heads: Mistral, Qwen 2 and Qwen 3."""
    size = config.hidden_size
    operations: list[Operation] = []
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        head_norms = [Norm(f"{prefix}.self_attn.{name}.weight", config.head_dim) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = head_norms if config.has_head_norms else (None, None)
        operations += [
            _attention(
                config,
                layer,
                norm=Norm(f"{prefix}.input_layernorm.weight", size),
                query_norm=query_norm,
                key_norm=key_norm,
            ),
            _feed_forward(config, layer, norm=Norm(f"{prefix}.post_attention_layernorm.weight", size)),
        ]
    return _model(config, operations, final_norm=Norm("model.norm.weight", size))


def describe_gemma3(config: ModelConfig) -> ModelDescription:
    """Describe the text side of Gemma 3; its norms' weights are what is added to one."""

    def norm(name: str, size: int) -> Norm:
        return Norm(f"model.{name}.weight", size, offset=1.0)

    size = config.hidden_size
    operations: list[Operation] = []
    for layer in range(config.num_layers):
        operations += [
            _attention(
                config,
                layer,
                norm=norm(f"layers.{layer}.input_layernorm", size),
                query_norm=norm(f"layers.{layer}.self_attn.q_norm", config.head_dim),
                key_norm=norm(f"layers.{layer}.self_attn.k_norm", config.head_dim),
                norm_after=norm(f"layers.{layer}.post_attention_layernorm", size),
            ),
            _feed_forward(
                config,
                layer,
                norm=norm(f"layers.{layer}.pre_feedforward_layernorm", size),
                norm_after=norm(f"layers.{layer}.post_feedforward_layernorm", size),
                activation=Activation.GELU_TANH,
            ),
        ]
    return _model(config, operations, final_norm=norm("norm", size), embedding_scale=math.sqrt(size))


_DESCRIPTIONS: Mapping[str, Callable[[ModelConfig], ModelDescription]] = {
    LLAMA: describe_llama,
    MISTRAL: describe_llama,
    QWEN2: describe_llama,
    QWEN3: describe_llama,
    GEMMA3: describe_gemma3,
}


def _attention(
    config: ModelConfig,
    layer: int,
    *,
    norm: Norm,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
    norm_after: Norm | None = None,
) -> Attention:
    size, query_size = config.hidden_size, config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim

    def projection(name: str, num_outputs: int, num_inputs: int, has_bias: bool) -> Projection:
        prefix = f"model.layers.{layer}.self_attn.{name}"
        return Projection(f"{prefix}.weight", num_outputs, num_inputs, f"{prefix}.bias" if has_bias else None)

    return Attention(
        norm=norm,
        query=projection("q_proj", query_size, size, config.has_qkv_bias),
        key=projection("k_proj", kv_size, size, config.has_qkv_bias),
        value=projection("v_proj", kv_size, size, config.has_qkv_bias),
        output=projection("o_proj", size, query_size, config.has_output_bias),
        rotary=config.rotary_of(layer),
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        window=config.window_of(layer),
        query_norm=query_norm,
        key_norm=key_norm,
        norm_after=norm_after,
    )


def _feed_forward(
    config: ModelConfig,
    layer: int,
    *,
    norm: Norm,
    norm_after: Norm | None = None,
    activation: Activation = Activation.SILU,
) -> FeedForward:
    size, inner = config.hidden_size, config.intermediate_size
    prefix = f"model.layers.{layer}.mlp"
    return FeedForward(
        norm=norm,
        gate=Projection(f"{prefix}.gate_proj.weight", inner, size),
        up=Projection(f"{prefix}.up_proj.weight", inner, size),
        down=Projection(f"{prefix}.down_proj.weight", size, inner),
        activation=activation,
        norm_after=norm_after,
    )


def _model(
    config: ModelConfig, operations: list[Operation], *, final_norm: Norm, embedding_scale: float = 1.0
) -> ModelDescription:
    head = Projection("lm_head.weight", config.vocab_size, config.hidden_size)
    return ModelDescription(
        embedding=Projection("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
        embedding_scale=embedding_scale,
        operations=tuple(operations),
        final_norm=final_norm,
        head=None if config.has_tied_embeddings else head,
        head_rows=Span(0, config.vocab_size),
        unused=(head.weight,) if config.has_tied_embeddings else (),
    )
