"""Weights from a folder with ``config.json`` and safetensors files.

Owns reading that layout, one file or several with an index. It must not know how a model computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from libs.errors import ModelLoadFailed
from services.worker.folder_config import read_folder_config, read_json

_INDEX_FILE = "model.safetensors.index.json"


class SafetensorsWeights:
    """A ``WeightSource`` over a folder. Open files are Any here: safetensors ships no types for them."""

    def __init__(self, folder: Path) -> None:
        self.config = read_folder_config(folder / "config.json")
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
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        strange = [name for name in names if Path(name).name != name]
        if strange:
            raise ModelLoadFailed(f"{index} names {strange[0]!r}, which is not a file beside it.")
        files = [folder / name for name in names]
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
