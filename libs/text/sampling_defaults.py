"""How a model's authors say that it is best sampled from, where a request says nothing.

Owns where the files say so: ``generation_config.json`` of the transformers library, and GGUF's ``general.sampling``
keys. It must not know which values can be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from libs.text.gguf_header import GgufHeader

_FOLDER_NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_KEYS: Final[Mapping[str, str]] = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def folder_sampling_defaults(generation_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the parsed ``generation_config.json`` says, by the names of requests. Any: unchecked."""
    return {name: value for name in _FOLDER_NAMES if (value := generation_config.get(name)) is not None}


def gguf_sampling_defaults(header: GgufHeader) -> Mapping[str, Any]:
    """Return what a GGUF file says, by the names of requests. Any: unchecked."""
    values = {name: header.values.get(key) for name, key in _GGUF_KEYS.items()}
    # The file has 32 bits of them: 0.6 is what was meant by 0.6000000238418579.
    return {
        name: float(f"{value:.7g}") if isinstance(value, float) else value
        for name, value in values.items()
        if value is not None
    }
