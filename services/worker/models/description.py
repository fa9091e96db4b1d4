"""Models as lists of operations over named weights.

Owns which operations an architecture consists of and how its weights are named. It must not know how an operation
is computed: a plan for native code is made from the list, so that an architecture of the same operations needs
nothing but a description.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.weights import ModelConfig


@dataclass(frozen=True, slots=True)
class Attention:
    """Norm, attention with rotary positions over the cache, and the sum with what came in."""

    norm: str
    query: str
    key: str
    value: str
    output: str


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Norm, ``down(silu(gate) * up)``, and the sum with what came in."""

    norm: str
    gate: str
    up: str
    down: str


Operation = Attention | FeedForward


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The operations of a model in their order; the names are those of its weights."""

    embedding: str
    operations: tuple[Operation, ...]
    final_norm: str
    head: str | None  # None when the head is the embedding
    unused: tuple[str, ...]  # what files may carry beside it


def describe_llama(config: ModelConfig) -> ModelDescription:
    """Describe the Llama architecture."""
    operations: list[Operation] = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        operations += [
            Attention(
                norm=f"{prefix}.input_layernorm.weight",
                query=f"{prefix}.self_attn.q_proj.weight",
                key=f"{prefix}.self_attn.k_proj.weight",
                value=f"{prefix}.self_attn.v_proj.weight",
                output=f"{prefix}.self_attn.o_proj.weight",
            ),
            FeedForward(
                norm=f"{prefix}.post_attention_layernorm.weight",
                gate=f"{prefix}.mlp.gate_proj.weight",
                up=f"{prefix}.mlp.up_proj.weight",
                down=f"{prefix}.mlp.down_proj.weight",
            ),
        ]
    head = "lm_head.weight"
    return ModelDescription(
        embedding="model.embed_tokens.weight",
        operations=tuple(operations),
        final_norm="model.norm.weight",
        head=None if config.has_tied_embeddings else head,
        unused=(head,) if config.has_tied_embeddings else (),
    )
