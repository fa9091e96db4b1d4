"""Which format a model's files have.

Owns the choice of a reader. It must not know what the tensors are for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from libs.errors import ModelLoadFailed
from services.worker.gguf_weights import GgufWeights
from services.worker.safetensors_weights import SafetensorsWeights
from services.worker.weights import WeightSource

# What readers stumble over in files that somebody has broken, by chance or to do harm: models come from strangers.
_BROKEN: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def open_weights(path: Path) -> WeightSource:
    """Open a GGUF file or a folder with ``config.json`` and safetensors files.

    Raises:
        ModelLoadFailed: when the path holds neither, or a model that is not served.
    """
    try:
        if path.is_dir():
            return SafetensorsWeights(path)
        if path.suffix == ".gguf" and path.is_file():
            return GgufWeights(path)
    except _BROKEN as error:
        reason = str(error) or type(error).__name__
        raise ModelLoadFailed(f"{path} describes a model that cannot be: {reason}.") from error
    raise ModelLoadFailed(f"{path} is neither a folder with config.json and safetensors files nor a .gguf file.")
