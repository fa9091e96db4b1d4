"""Where a model's files are.

Owns the meaning of the ``model`` setting: the name of a packaged model, a folder, or a GGUF file. It must not know
what is inside of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from libs.errors import ModelLoadFailed
from libs.text.packaged_model import PACKAGED_MODELS, SMOLLM2

EMBEDDED_MODEL_NAME: Final = SMOLLM2.name


def resolve_model_path(model: str) -> Path:
    """Return the folder or GGUF file that ``model`` stands for."""
    for packaged in PACKAGED_MODELS:
        if model in (packaged.name, packaged.distribution):
            return packaged.prepare()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return path
    names = " or ".join(repr(packaged.name) for packaged in PACKAGED_MODELS)
    raise ModelLoadFailed(
        f"No model at {model!r}. Give {names}, a folder with config.json and tokenizer.json, "
        "or a file that ends in .gguf."
    )


def default_served_model_name(path: Path) -> str:
    """Return the name under which clients ask for the model at ``path`` unless the operator chose another."""
    for packaged in PACKAGED_MODELS:
        if path == packaged.find():
            return packaged.name
    # A folder's name may have dots that are no suffix: Qwen2.5-0.5B.
    name = path.stem if path.suffix == ".gguf" else path.resolve().name
    return name.lower()
