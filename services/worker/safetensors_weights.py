"""Weights from a folder with ``config.json`` and safetensors files.

Owns reading that layout, one file or several with an index. It must not know how a model computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from libs.errors import ModelLoadFailed
from libs.text.pointer_files import refuse_pointer
from services.worker.folder_config import read_folder_config, read_json

_INDEX_FILE = "model.safetensors.index.json"
_WHOLE_FILE = "model.safetensors"
_PREFIX = "model."
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class SafetensorsWeights:
    """A ``WeightSource`` over a folder. Open files are Any here: safetensors ships no types for them."""

    def __init__(self, folder: Path) -> None:
        self.config = read_folder_config(folder / "config.json")
        try:
            self._file_of = _open_tensors(_weight_files(folder))
            self._stored_names = _stored_names(self._file_of.keys())
            self.sizes_bytes = {name: _size_bytes(self._file_of[at], at) for name, at in self._stored_names.items()}
            if self._has_head_of_its_own():
                self.config = dataclasses.replace(self.config, has_tied_embeddings=False)
        except (SafetensorError, OSError) as error:
            raise ModelLoadFailed(f"The safetensors files in {folder} cannot be read: {error}.") from error

    def read(self, name: str) -> Tensor:
        """Return one tensor in the dtype of the file."""
        stored_name = self._stored_names[name]
        tensor: Tensor = self._file_of[stored_name].get_tensor(stored_name)
        if not tensor.is_floating_point():
            raise ModelLoadFailed(f"The tensor {name} is quantized ({tensor.dtype}); this format is not served.")
        return tensor

    def _has_head_of_its_own(self) -> bool:
        """Whether the files have another head than the embedding that the configuration says it is.

        Some were trained apart and kept the configuration of the model that they began as. The transformers library
        then takes what was trained.
        """
        is_said_tied = self.config.has_tied_embeddings and {_HEAD, _EMBEDDING} <= self._stored_names.keys()
        return is_said_tied and not torch.equal(self.read(_HEAD), self.read(_EMBEDDING))


def _open_tensors(paths: list[Path]) -> dict[str, Any]:
    """Return the open file of each tensor by the name that it has there."""
    opened: dict[str, Any] = {}
    path_of: dict[str, Path] = {}
    for path in paths:
        refuse_pointer(path)
        file: Any = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118
            if name in opened:
                raise ModelLoadFailed(
                    f"{path_of[name].name} and {path.name} in {path.parent} both hold the tensor {name}; remove "
                    "the file that is not part of the model."
                )
            opened[name], path_of[name] = file, path
    return opened


def _stored_names(names: Collection[str]) -> dict[str, str]:
    """Return by canonical name where a tensor is stored: files of a model without its head lack the prefix."""
    has_prefix = any(name.startswith(_PREFIX) for name in names)
    return {name if has_prefix or name == _HEAD else f"{_PREFIX}{name}": name for name in names}


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX_FILE
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        strange = [name for name in names if Path(name).name != name]
        if strange:
            raise ModelLoadFailed(f"{index} names {strange[0]!r}, which is not a file beside it.")
        files = [folder / name for name in names]
    elif (folder / _WHOLE_FILE).exists():
        # Others beside it are adapters, the same weights in their author's format, or leftovers.
        files = [folder / _WHOLE_FILE]
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
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
