"""The shape of a model as the ``config.json`` of its folder tells it.

Owns the keys of the transformers library and their defaults, and refuses what they ask for that is not served. It
must not know tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libs.errors import ModelLoadFailed
from libs.text.context_length import max_context_length
from services.worker.weights import (
    ARCHITECTURES,
    GEMMA3,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    LinearRopeScaling,
    Llama3RopeScaling,
    ModelConfig,
    RopeScaling,
    YarnRopeScaling,
    layer_count,
    yarn_amplitude,
)

# What a key may say. Absent keys and null are always fine; a key that is not here does not change results or stands
# for an architecture of its own.
_SERVED: Mapping[str, tuple[Any, ...]] = {
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "use_qk_norm": (False,),
    "use_mrope": (False,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
}
# Per architecture, keys whose meaning differs from one to the other.
_ACTIVATION_KEYS = {GEMMA3: "hidden_activation"}
_ACTIVATIONS = {GEMMA3: ("gelu_pytorch_tanh",)}
_MODEL_TYPES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3,
}
# Keys that such a configuration may leave out, as transformers fills them in.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    LLAMA: {"rms_norm_eps": 1e-6, "max_position_embeddings": 2_048},
    MISTRAL: {"sliding_window": 4_096, "num_key_value_heads": 8, "rms_norm_eps": 1e-6},
    QWEN2: {"sliding_window": 4_096, "max_window_layers": 28, "rms_norm_eps": 1e-6},
    QWEN3: {"sliding_window": 4_096, "max_window_layers": 28, "head_dim": 128, "rms_norm_eps": 1e-6},
    GEMMA3: {
        "sliding_window": 4_096,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}
_GEMMA3_WINDOW_PATTERN = 6
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_folder_config(path: Path) -> ModelConfig:
    """Read the ``config.json`` at ``path``.

    Raises:
        ModelLoadFailed: when it cannot be read, lacks something, or asks for what is not served.
    """
    if not path.exists():
        raise ModelLoadFailed(f"{path.parent} has no {path.name}.")
    values = read_json(path)
    architecture = _architecture(values, path)
    values = dict(_DEFAULTS.get(architecture, {})) | values
    _refuse_variants(values, architecture, path)
    try:
        return _model_config(values, architecture, path)
    except KeyError as error:
        raise ModelLoadFailed(f"{path} does not say {error.args[0]}.") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelLoadFailed(f"{path} has a value that cannot be understood: {error}.") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Any: the schema is that of another library."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadFailed(f"{path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ModelLoadFailed(f"{path} must hold an object.")
    return values


def _architecture(values: Mapping[str, Any], path: Path) -> str:
    listed = values.get("architectures") or [
        _MODEL_TYPES.get(str(values.get("model_type")), values.get("model_type"))
    ]
    named = listed[0] if isinstance(listed, list) else listed
    if named not in ARCHITECTURES:
        raise ModelLoadFailed(
            f"{path} names the architecture {named!r}, which is not served; these are: {', '.join(ARCHITECTURES)}."
        )
    return str(named)


def _refuse_variants(values: Mapping[str, Any], architecture: str, path: Path) -> None:
    quantization = values.get("quantization_config")
    if quantization is not None:
        # The rest is long: it may list all layers.
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelLoadFailed(
            f"{path} has a quantization_config with quant_method = {method!r}, which is not served; use the "
            "model's unquantized weights, or a GGUF file of it."
        )
    activation_key = _ACTIVATION_KEYS.get(architecture, "hidden_act")
    served = {**_SERVED, activation_key: _ACTIVATIONS.get(architecture, ("silu", "swish"))}
    if architecture == QWEN2:
        # Its queries, keys and values always have a bias and its output never has.
        served["attention_bias"] = (True,)
    if architecture == MISTRAL:
        served["attention_bias"] = (False,)
    for key, served_values in served.items():
        value = values.get(key)
        if value is not None and value not in served_values:
            raise ModelLoadFailed(f"{path} has {key} = {value!r}, which is not served.")


def _model_config(values: Mapping[str, Any], architecture: str, path: Path) -> ModelConfig:
    num_layers, num_heads = layer_count(values["num_hidden_layers"], path), int(values["num_attention_heads"])
    windows = _layer_windows(values, architecture, num_layers, path)
    rope, window_rope = _rope_tables(values, architecture, path)
    has_bias = bool(values.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=int(values["hidden_size"]),
        num_heads=num_heads,
        num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
        head_dim=int(values.get("head_dim") or values["hidden_size"] // num_heads),
        intermediate_size=int(values["intermediate_size"]),
        vocab_size=int(values["vocab_size"]),
        rope_theta=float(rope.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope, values, path),
        rms_norm_eps=float(values["rms_norm_eps"]),
        has_tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        max_position=int(max_context_length(values) or values["max_position_embeddings"]),
        layer_windows=windows,
        window_rope_theta=_window_rope_theta(window_rope, values, path),
        has_qkv_bias=has_bias or architecture == QWEN2,
        has_output_bias=has_bias and architecture != QWEN2,
        attention_scale=float(values["query_pre_attn_scalar"]) ** -0.5 if architecture == GEMMA3 else None,
    )


def _layer_windows(
    values: Mapping[str, Any], architecture: str, num_layers: int, path: Path
) -> tuple[int | None, ...]:
    """Return the window of each layer, or nothing when all layers see all tokens."""
    window = values.get("sliding_window")
    if architecture == LLAMA or (architecture in (QWEN2, QWEN3) and not values.get("use_sliding_window")):
        window = None
    by_default = _default_layer_types(values, architecture, num_layers)
    kinds = values.get("layer_types") or by_default
    unknown = sorted(set(map(str, kinds)) - {_SLIDING, _FULL})
    if unknown:
        raise ModelLoadFailed(f"{path} has layers of type {', '.join(unknown)}, which are not served.")
    if _SLIDING in kinds and (architecture == LLAMA or (architecture == GEMMA3 and window is None)):
        raise ModelLoadFailed(f"{path} has layers of type {_SLIDING}, but {architecture} has no window for them.")
    if architecture == MISTRAL and window is not None and kinds != by_default:
        raise ModelLoadFailed(f"{path} has layer_types, but {MISTRAL} has its window in all layers.")
    return () if window is None else tuple(int(window) if kind == _SLIDING else None for kind in kinds)


def _default_layer_types(values: Mapping[str, Any], architecture: str, num_layers: int) -> list[str]:
    if architecture == MISTRAL:
        return [_SLIDING] * num_layers
    if architecture in (QWEN2, QWEN3):
        first = int(values["max_window_layers"])
        return [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]
    if architecture == GEMMA3:
        pattern = int(values.get("sliding_window_pattern") or _GEMMA3_WINDOW_PATTERN)
        return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]
    return [_FULL] * num_layers


def _rope_tables(
    values: Mapping[str, Any], architecture: str, path: Path
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return what is said of rotary positions: of layers that see all tokens, and of layers with a window.

    Newer files keep all in one table, or in one for each type of layers; older ones have a table of the scaling.
    """
    tables = values.get("rope_parameters") or {}
    full = {"rope_theta": values.get("rope_theta")}
    if not tables.keys() & {_FULL, _SLIDING}:
        if tables and architecture == GEMMA3:
            raise ModelLoadFailed(f"{path} has rope_parameters without {_FULL} and {_SLIDING}.")
        full |= tables or values.get("rope_scaling") or {}
    else:
        full |= tables.get(_FULL) or {}
    if architecture == GEMMA3:
        return full, {"rope_theta": values["rope_local_base_freq"]} | (tables.get(_SLIDING) or {})
    return full, tables.get(_SLIDING)


def _window_rope_theta(rope: Mapping[str, Any] | None, values: Mapping[str, Any], path: Path) -> float | None:
    if rope is None:
        return None
    if _rope_scaling(rope, values, path) is not None:
        raise ModelLoadFailed(f"{path} asks for rotary scaling in layers with a sliding window; it is not served.")
    return float(rope["rope_theta"])


def _rope_scaling(rope: Mapping[str, Any], values: Mapping[str, Any], path: Path) -> RopeScaling | None:
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelLoadFailed(f"{path} rotates a part of each head only, which is not served.")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRopeScaling(float(rope["factor"]))
        case "llama3":
            return Llama3RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position=_original_max_position(rope, values),
            )
        case "yarn":
            return YarnRopeScaling(
                factor=float(rope["factor"]),
                original_max_position=_original_max_position(rope, values),
                beta_fast=float(rope.get("beta_fast") or 32.0),
                beta_slow=float(rope.get("beta_slow") or 1.0),
                amplitude=_yarn_amplitude(rope),
                has_whole_borders=bool(rope.get("truncate", True)),
            )
        case _:
            raise ModelLoadFailed(
                f"{path} asks for rotary scaling of type {kind!r}; linear, llama3 and yarn are served."
            )


def _original_max_position(rope: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    return int(
        values.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or values["max_position_embeddings"]
    )


def _yarn_amplitude(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = float(rope["factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_amplitude(factor, rope["mscale"]) / yarn_amplitude(factor, rope["mscale_all_dim"])
    return yarn_amplitude(factor)
