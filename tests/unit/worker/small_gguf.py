"""GGUF files as llama.cpp's converter writes them, of models with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from numpy.typing import NDArray
from transformers import PreTrainedModel

GgufType = gguf.GGMLQuantizationType
FloatArray = NDArray[np.float32]
Quantize = Callable[[FloatArray], NDArray[Any]]

_ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    kind: GgufType = GgufType.F32,
    *,
    quantize_matrix: Quantize | None = None,
    more_tensors: Mapping[str, torch.Tensor] | None = None,
    are_windows_and_scale_said: bool = True,
    **changes: Any,
) -> Path:
    """Write the model with matrices of this kind; ``changes`` add metadata of any kind, a tuple by its parts."""
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[architecture])
    _write_metadata(writer, config, are_windows_and_scale_said)
    for key, value in changes.items():
        getattr(writer, f"add_{key}")(*(value if isinstance(value, tuple) else (value,)))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in {**model.state_dict(), **(more_tensors or {})}.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _converted(name, tensor.numpy().astype(np.float32), config)
        is_matrix = values.ndim == 2
        stored = (quantize_matrix or (lambda matrix: quantize(matrix, kind)))(values) if is_matrix else values
        raw = kind if is_matrix and kind not in (GgufType.F32, GgufType.F16) else None
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")) or name, stored, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: Any, are_windows_and_scale_said: bool) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"w{index}" for index in range(config.vocab_size)])
    if config.model_type == "mistral" and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        if are_windows_and_scale_said:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
            writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _converted(name: str, values: FloatArray, config: Any) -> FloatArray:
    """Bring values into the conventions of the architecture's files."""
    if config.model_type in ("llama", "mistral"):
        if ".q_proj." in name:
            return _permuted(values, config.num_attention_heads)
        if ".k_proj." in name:
            return _permuted(values, config.num_key_value_heads)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return values + np.float32(1.0)
    return values


def _permuted(values: FloatArray, num_heads: int) -> FloatArray:
    """Put the two values of a rotated pair side by side."""
    halves = values.reshape(num_heads, 2, len(values) // num_heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
