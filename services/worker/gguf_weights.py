"""Weights from a GGUF file.

Owns the file's names, quantized formats and conventions, translated to those of the transformers library. It
must not know how a model computes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from numpy.typing import NDArray
from torch import Tensor

from libs.errors import ModelLoadFailed
from services.worker.gguf_dequantization import dequantized
from services.worker.weights import LLAMA, FrequencyFactors, ModelConfig, RopeScaling

_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


# Arrays that a model's shape needs have an item for each layer at most; longer ones are the vocabulary's.
_MAX_ITEMS = 4_096


class GgufWeights:
    """A ``WeightSource`` over a GGUF file, which stays mapped into memory while it is read."""

    def __init__(self, path: Path) -> None:
        try:
            reader = _TensorReader(path)
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise ModelLoadFailed(f"{path} cannot be read as GGUF: {error}.") from error
        self._tensors = {_canonical_name(tensor.name): tensor for tensor in reader.tensors}
        factors = self._tensors.pop(_ROPE_FACTORS, None)
        self.config = _model_config(
            path,
            _Metadata(reader, path),
            scaling=None if factors is None else FrequencyFactors(tuple(map(float, _values(factors)))),
            tensor_names=self._tensors.keys(),
        )
        self.sizes_bytes = {name: int(tensor.n_bytes) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor as fp32, rows of queries and keys in the half-rotated order."""
        values = _values(self._tensors[name])
        if name.endswith("q_proj.weight"):
            values = _half_rotated(values, self.config.num_heads)
        elif name.endswith("k_proj.weight"):
            values = _half_rotated(values, self.config.num_kv_heads)
        return torch.from_numpy(values)


class _TensorReader(GGUFReader):
    """The package's reader without arrays of strings and long arrays: vocabularies take 1.6 s and are not ours."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:  # Any: a tuple of the package's own parts.
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data: memoryview = memoryview(self.data)  # type: ignore[arg-type]  # An array is a buffer.
        item_type, num_items = struct.unpack_from("<IQ", data, orig_offs)
        offset = orig_offs + 12
        if item_type == GGUFValueType.STRING:
            for _ in range(num_items):
                offset += 8 + struct.unpack_from("<Q", data, offset)[0]
        elif num_items > _MAX_ITEMS and item_type in self.gguf_scalar_to_np:
            offset += num_items * np.dtype(self.gguf_scalar_to_np[GGUFValueType(item_type)]).itemsize
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return offset - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(item_type)]


class _Metadata:
    """The file's key-value pairs with clear errors."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._reader = reader
        self._path = path

    def optional(self, key: str) -> Any:  # Any: a value's type depends on its key.
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def required(self, key: str) -> Any:  # Any: as above.
        value = self.optional(key)
        if value is None:
            raise ModelLoadFailed(f"{self._path} does not say {key}.")
        return value


def _model_config(
    path: Path, metadata: _Metadata, *, scaling: RopeScaling | None, tensor_names: Collection[str]
) -> ModelConfig:
    architecture = metadata.required("general.architecture")
    if architecture != "llama":
        raise ModelLoadFailed(f"{path} holds the architecture {architecture!r}; only llama is served.")
    _refuse_variants(path, metadata)
    hidden_size, num_heads = (
        metadata.required("llama.embedding_length"),
        metadata.required("llama.attention.head_count"),
    )
    head_dim = metadata.optional("llama.attention.key_length") or hidden_size // num_heads
    if (metadata.optional("llama.rope.dimension_count") or head_dim) != head_dim:
        raise ModelLoadFailed(f"{path} rotates a part of each head only, which is not served.")
    return ModelConfig(
        architecture=LLAMA,
        num_layers=metadata.required("llama.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=metadata.optional("llama.attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        intermediate_size=metadata.required("llama.feed_forward_length"),
        vocab_size=metadata.required("llama.vocab_size"),
        rope_theta=float(metadata.optional("llama.rope.freq_base") or 10_000.0),
        rope_scaling=scaling,
        rms_norm_eps=metadata.required("llama.attention.layer_norm_rms_epsilon"),
        has_tied_embeddings="lm_head.weight" not in tensor_names,
        max_position=metadata.required("llama.context_length"),
    )


def _refuse_variants(path: Path, metadata: _Metadata) -> None:
    if metadata.optional("llama.expert_count"):
        raise ModelLoadFailed(f"{path} holds a mixture of experts, which is not served.")
    if (metadata.optional("split.count") or 1) > 1:
        raise ModelLoadFailed(f"{path} is one part of a split file; merge the parts first.")
    scaling = metadata.optional("llama.rope.scaling.type")
    if scaling not in (None, "none", ""):
        raise ModelLoadFailed(f"{path} asks for rotary scaling of type {scaling!r}, which is not served.")


def _canonical_name(name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
    return _NAMES.get(name, name)


def _values(tensor: Any) -> NDArray[np.float32]:  # Any: gguf ships no type information for its tensors.
    kind = GGMLQuantizationType(tensor.tensor_type)
    try:
        values = dequantized(tensor.data, kind)
    except NotImplementedError as error:
        raise ModelLoadFailed(
            f"The tensor {tensor.name} has the format {kind.name}, which is not served."
        ) from error
    # A copy where dequantizing gave a view of the file: the file may not be written, torch wants memory that may.
    return np.array(values, dtype=np.float32, copy=None if values.flags.writeable else True)


def _half_rotated(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the row order of GGUF's llama architecture.

    It keeps the two values that are rotated together side by side; here the first half of a head holds all
    first values and the second half all second ones.
    """
    num_rows, num_columns = values.shape
    pairs = values.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, num_columns)
