"""The shape of a model as the metadata of its GGUF file tells it.

Owns GGUF's keys, what llama.cpp knows of an architecture without a key, and the refusal of what is not served. It
must not know how tensors are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.errors import ModelLoadFailed
from services.worker.weights import (
    GEMMA3,
    LLAMA,
    QWEN2,
    QWEN3,
    FrequencyFactors,
    LinearRopeScaling,
    ModelConfig,
    RopeScaling,
    YarnRopeScaling,
    layer_count,
    yarn_amplitude,
)

# Mistral's files name the architecture llama.
GGUF_ARCHITECTURES: Mapping[str, str] = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gemma3": GEMMA3}

# Keys that change results and what they may say; behind the architecture's name and a dot.
_SERVED: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.causal": (True,),
    "pooling_type": (0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "logit_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_GEMMA3_WINDOW_PATTERN = 6
_GEMMA3_WINDOW_ROPE_THETA = 10_000.0
# The one size whose scores are not scaled by the size of a head is told apart by its layers.
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """The key-value pairs of a file, with clear errors."""

    path: Path
    value_of: Callable[[str], Any]  # None when there is no such key. Any: a value's type depends on its key.

    @property
    def architecture(self) -> str:
        """The architecture by its name in GGUF."""
        return str(self._required("general.architecture"))

    def optional(self, key: str) -> Any:
        """Return the value of the architecture's ``key``, or None."""
        return self.value_of(f"{self.architecture}.{key}")

    def required(self, key: str) -> Any:
        """Return the value of the architecture's ``key``."""
        return self._required(f"{self.architecture}.{key}")

    def _required(self, key: str) -> Any:
        value = self.value_of(key)
        if value is None:
            raise ModelLoadFailed(f"{self.path} does not say {key}.")
        return value


def read_gguf_config(
    metadata: GgufMetadata,
    *,
    frequency_factors: tuple[float, ...] | None,
    vocab_size: int,
    tensor_names: Collection[str],
) -> ModelConfig:
    """Read the model's shape; ``tensor_names`` are those of the transformers library.

    Raises:
        ModelLoadFailed: when the file lacks something or asks for what is not served.
    """
    architecture = GGUF_ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        raise ModelLoadFailed(
            f"{metadata.path} holds the architecture {metadata.architecture!r}, which is not served; "
            f"these are: {', '.join(GGUF_ARCHITECTURES)}."
        )
    _refuse_variants(metadata)
    num_layers = layer_count(metadata.required("block_count"), metadata.path)
    num_heads = int(metadata.required("attention.head_count"))
    hidden_size = int(metadata.required("embedding_length"))
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=int(metadata.optional("attention.head_count_kv") or num_heads),
        head_dim=_head_dim(metadata, hidden_size // num_heads),
        intermediate_size=int(metadata.required("feed_forward_length")),
        # Some files name the size of another version of the model; llama.cpp goes by what there is, too.
        vocab_size=int(vocab_size or metadata.optional("vocab_size") or 0),
        rope_theta=float(metadata.optional("rope.freq_base") or 10_000.0),
        rope_scaling=_rope_scaling(metadata, frequency_factors),
        rms_norm_eps=float(metadata.required("attention.layer_norm_rms_epsilon")),
        has_tied_embeddings="lm_head.weight" not in tensor_names,
        max_position=int(metadata.required("context_length")),
        layer_windows=_layer_windows(metadata, architecture, num_layers),
        window_rope_theta=_window_rope_theta(metadata) if architecture == GEMMA3 else None,
        has_qkv_bias="model.layers.0.self_attn.q_proj.bias" in tensor_names,
        has_output_bias="model.layers.0.self_attn.o_proj.bias" in tensor_names,
        attention_scale=_attention_scale(metadata, architecture, num_layers, hidden_size / num_heads),
    )


def _refuse_variants(metadata: GgufMetadata) -> None:
    if metadata.optional("expert_count"):
        raise ModelLoadFailed(f"{metadata.path} holds a mixture of experts, which is not served.")
    for key, served in _SERVED.items():
        value = metadata.optional(key)
        if value is not None and value not in served:
            raise ModelLoadFailed(f"{metadata.path} has {key} = {value!r}, which is not served.")
    if (metadata.value_of("split.count") or 1) > 1:
        raise ModelLoadFailed(f"{metadata.path} is one part of a split file; merge the parts first.")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(metadata.optional(key), list):
            raise ModelLoadFailed(f"{metadata.path} has layers of different {key}, which is not served.")


def _head_dim(metadata: GgufMetadata, by_default: int) -> int:
    head_dim = int(metadata.optional("attention.key_length") or by_default)
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        if (metadata.optional(key) or head_dim) != head_dim:
            raise ModelLoadFailed(f"{metadata.path} has keys and values of different sizes, which is not served.")
    if (metadata.optional("rope.dimension_count") or head_dim) != head_dim:
        raise ModelLoadFailed(f"{metadata.path} rotates a part of each head only, which is not served.")
    return head_dim


def _rope_scaling(metadata: GgufMetadata, frequency_factors: tuple[float, ...] | None) -> RopeScaling | None:
    factor = metadata.optional("rope.scaling.factor") or metadata.optional("rope.scale_linear")
    # To llama.cpp a factor alone is a linear one; the other key is that of older files.
    kind = metadata.optional("rope.scaling.type") or ("none" if factor in (None, 1.0) else "linear")
    if frequency_factors is not None:
        if kind != "none":
            raise ModelLoadFailed(f"{metadata.path} scales rotary positions in two ways; one is served.")
        return FrequencyFactors(frequency_factors)
    match kind:
        case "none":
            return None
        case "linear":
            return LinearRopeScaling(float(factor or metadata.required("rope.scaling.factor")))
        case "yarn":
            factor = float(metadata.required("rope.scaling.factor"))
            return YarnRopeScaling(
                factor=factor,
                original_max_position=int(
                    metadata.optional("rope.scaling.original_context_length") or metadata.required("context_length")
                ),
                beta_fast=float(metadata.optional("rope.scaling.yarn_beta_fast") or 32.0),
                beta_slow=float(metadata.optional("rope.scaling.yarn_beta_slow") or 1.0),
                amplitude=yarn_amplitude(factor),
                has_whole_borders=True,
            )
        case _:
            raise ModelLoadFailed(
                f"{metadata.path} asks for rotary scaling of type {kind!r}; linear and yarn are served."
            )


def _layer_windows(metadata: GgufMetadata, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window, pattern = (
        metadata.optional("attention.sliding_window"),
        metadata.optional("attention.sliding_window_pattern"),
    )
    if architecture == GEMMA3:
        window = metadata.required("attention.sliding_window")
        pattern = pattern or _GEMMA3_WINDOW_PATTERN
    if not window:
        return ()
    if isinstance(pattern, list):
        return tuple(int(window) if has_window else None for has_window in pattern)
    if pattern is not None:
        # Every so many layers one sees all tokens.
        return tuple(int(window) if (layer + 1) % int(pattern) else None for layer in range(num_layers))
    if architecture != LLAMA:
        raise ModelLoadFailed(
            f"{metadata.path} has a sliding window, but does not say in which layers "
            f"({metadata.architecture}.attention.sliding_window_pattern)."
        )
    return (int(window),) * num_layers  # As in Mistral.


def _window_rope_theta(metadata: GgufMetadata) -> float:
    return float(metadata.optional("rope.freq_base_swa") or _GEMMA3_WINDOW_ROPE_THETA)


def _attention_scale(
    metadata: GgufMetadata, architecture: str, num_layers: int, hidden_size_per_head: float
) -> float | None:
    scale = metadata.optional("attention.scale")
    if scale:
        return float(scale)
    if architecture == GEMMA3 and num_layers == _GEMMA3_27B_LAYERS:
        return float(hidden_size_per_head**-0.5)
    return None
