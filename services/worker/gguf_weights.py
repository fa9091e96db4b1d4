"""Weights from a GGUF file.

Owns the file's names, quantized formats and conventions, translated to those of the transformers library. It
must not know how a model computes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField
from numpy.typing import NDArray
from torch import Tensor

from libs.errors import ModelLoadFailed
from services.worker.gguf_config import GgufMetadata, read_gguf_config
from services.worker.gguf_dequantization import dequantized
from services.worker.weights import GEMMA3, LLAMA

_ROPE_FACTORS = "rope_freqs.weight"
# More than a model has layers, and less than a vocabulary has tokens.
_MAX_ARRAY_ITEMS = 4_096
_EMBEDDING = "token_embd.weight"
_NAMES = {
    _EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k": "self_attn.k_proj",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# With a norm behind the attention, too, the norm before the feed-forward has a name of its own.
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GgufWeights:
    """A ``WeightSource`` over a GGUF file, which stays mapped into memory while it is read."""

    def __init__(self, path: Path) -> None:
        try:
            reader = _TensorReader(path)
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise ModelLoadFailed(f"{path} cannot be read as GGUF: {error}.") from error
        metadata = GgufMetadata(path, partial(_value_of, reader))
        layer_names = _GEMMA3_LAYER_NAMES if metadata.architecture == "gemma3" else _LAYER_NAMES
        self._tensors = {_canonical_name(tensor.name, layer_names): tensor for tensor in reader.tensors}
        factors = self._tensors.pop(_ROPE_FACTORS, None)
        embedding = self._tensors.get(_NAMES[_EMBEDDING])
        self.config = read_gguf_config(
            metadata,
            frequency_factors=None if factors is None else tuple(map(float, _values(factors))),
            vocab_size=0 if embedding is None else int(embedding.shape[-1]),
            tensor_names=self._tensors.keys(),
        )
        self.sizes_bytes = {name: int(tensor.n_bytes) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return one tensor as fp32, in the conventions of the transformers library."""
        values = _values(self._tensors[name])
        if self.config.architecture == LLAMA:
            values = self._with_half_rotated_rows(name, values)
        if self.config.architecture == GEMMA3 and name.endswith("norm.weight"):
            values = values - np.float32(1.0)  # The file has the sum that norms multiply by.
        return torch.from_numpy(values)

    def _with_half_rotated_rows(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if ".q_proj." in name:
            return _half_rotated(values, self.config.num_heads)
        if ".k_proj." in name:
            return _half_rotated(values, self.config.num_kv_heads)
        return values


class _TensorReader(GGUFReader):
    """The package's reader without long arrays: they take it seconds and are the tokenizer's, not ours.

    It believes where a file says that its tensors are; here they must lie one after the other, as they do in every
    file that llama.cpp reads: with a format or a place that is not its own a tensor would be another's values.
    """

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        expected_offset = 0
        for field in fields:
            _, name_parts, _, dimensions, (kind,), (offset,) = field.parts
            name = bytes(name_parts).decode()
            if kind not in set(GGMLQuantizationType):
                raise ModelLoadFailed(
                    f"The tensor {name} has the unknown format number {kind}, which is not served."
                )
            if offset != expected_offset:
                raise ModelLoadFailed(
                    f"The tensor {name} begins at byte {offset} of the data instead of {expected_offset}; the file "
                    "is damaged, fetch it again."
                )
            block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            num_bytes = math.prod(dimensions.tolist()) * block_bytes // block_values
            expected_offset += -(-num_bytes // int(self.alignment)) * int(self.alignment)
        super()._build_tensors(start_offs, fields)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:  # Any: a tuple of the package's own parts.
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data: memoryview = memoryview(self.data)  # type: ignore[arg-type]  # An array is a buffer.
        item_type, num_items = struct.unpack_from("<IQ", data, orig_offs)
        offset = orig_offs + struct.calcsize("<IQ")
        if item_type == GGUFValueType.STRING:
            for _ in range(num_items):
                offset += 8 + struct.unpack_from("<Q", data, offset)[0]
        elif num_items > _MAX_ARRAY_ITEMS and item_type in self.gguf_scalar_to_np:
            offset += num_items * np.dtype(self.gguf_scalar_to_np[item_type]).itemsize
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return offset - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(item_type)]


def _value_of(reader: GGUFReader, key: str) -> Any:  # Any: a value's type depends on its key.
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _canonical_name(name: str, layer_names: Mapping[str, str]) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer is not None and layer[2] in layer_names:
        return f"model.layers.{layer[1]}.{layer_names[layer[2]]}.{layer[3]}"
    return _NAMES.get(name, name)


def _values(tensor: Any) -> NDArray[np.float32]:  # Any: gguf ships no type information for its tensors.
    kind = GGMLQuantizationType(tensor.tensor_type)
    try:
        values = dequantized(tensor.data, kind)
    except (NotImplementedError, AssertionError) as error:
        # The package asserts that it has a table for a format, and lacks some.
        raise ModelLoadFailed(
            f"The tensor {tensor.name} has the format {kind.name}, which is not served."
        ) from error
    # A copy where dequantizing gave a view of the file: the file may not be written, torch wants memory that may.
    return np.array(values, dtype=np.float32, copy=None if values.flags.writeable else True)


def _half_rotated(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the row order of GGUF's llama architecture.

    It keeps the two values that are rotated together side by side; here the first half of a head holds all
    first values and the second half all second ones. A tensor that has no such rows is refused by its shape, later.
    """
    if len(values) % (2 * num_heads):
        return values
    pairs = values.reshape(num_heads, len(values) // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
