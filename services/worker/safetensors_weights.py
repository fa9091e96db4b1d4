"""Weights from a folder with ``config.json`` and safetensors files.

Owns reading that layout, one file or several with an index. It must not know how a model computes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from libs.errors import ModelLoadFailed
from services.worker.weights import Llama3RopeScaling, ModelConfig, RopeScaling

_INDEX_FILE = "model.safetensors.index.json"


class SafetensorsWeights:
    """A ``WeightSource`` over a folder. Open files are Any here: safetensors ships no types for them."""

    def __init__(self, folder: Path) -> None:
        self.config = _model_config(folder)
        try:
            files: list[Any] = [safe_open(path, framework="pt") for path in _weight_files(folder)]
            self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            self.sizes_bytes = {name: _size_bytes(file, name) for name, file in self._file_of.items()}
        except (SafetensorError, OSError) as error:
            raise ModelLoadFailed(f"The safetensors files in {folder} cannot be read: {error}.") from error

    def read(self, name: str) -> Tensor:
        """Return one tensor in the dtype of the file."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelLoadFailed(f"The tensor {name} is quantized ({tensor.dtype}); this format is not served.")
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX_FILE
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        files = [folder / str(name) for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise ModelLoadFailed(
            f"{folder} lacks {', '.join(missing) or 'safetensors files'}; other formats than safetensors and "
            "GGUF are not served."
        )
    return files


def _size_bytes(file: Any, name: str) -> int:
    bits = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
    tensor = file.get_slice(name)
    num_values = 1
    for length in tensor.get_shape():
        num_values *= length
    return num_values * bits.get(tensor.get_dtype(), 8) // 8


def _model_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.exists():
        raise ModelLoadFailed(f"{folder} has no config.json.")
    values = _read_json(path)
    _refuse_variants(values, path)
    try:
        return ModelConfig(
            architecture=(values.get("architectures") or ["none named"])[0],
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
            head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
            intermediate_size=values["intermediate_size"],
            vocab_size=values["vocab_size"],
            rope_theta=float(_rope_values(values).get("rope_theta", values.get("rope_theta", 10_000.0))),
            rope_scaling=_rope_scaling(values, path),
            rms_norm_eps=values["rms_norm_eps"],
            has_tied_embeddings=values.get("tie_word_embeddings", False),
            max_position=values["max_position_embeddings"],
        )
    except KeyError as error:
        raise ModelLoadFailed(f"{path} does not say {error.args[0]}.") from error


def _refuse_variants(values: dict[str, Any], path: Path) -> None:
    expected: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0, None),
    }
    for key, served in expected.items():
        if values.get(key) not in served:
            raise ModelLoadFailed(f"{path} has {key} = {values[key]!r}, which is not served.")


def _rope_values(values: dict[str, Any]) -> dict[str, Any]:
    # Newer files keep all rotary values in one table, older ones the scaling alone.
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _rope_scaling(values: dict[str, Any], path: Path) -> RopeScaling | None:
    rope = _rope_values(values)
    kind = rope.get("rope_type", rope.get("type", "default"))
    match kind:
        case "default":
            return None
        case "llama3":
            return Llama3RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position=int(rope["original_max_position_embeddings"]),
            )
        case _:
            raise ModelLoadFailed(f"{path} asks for rotary scaling of type {kind!r}; only llama3 is served.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadFailed(f"{path} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ModelLoadFailed(f"{path} must hold an object.")
    return values
