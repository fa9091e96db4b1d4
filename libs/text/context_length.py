"""The longest context that a model's configuration allows.

Owns what scaled rotary positions do to it. It must not know tokenizers or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

# Of these the length that a configuration names is that of the model before its positions were stretched.
_STRETCHING: Final = ("linear", "yarn")


def max_context_length(config: Mapping[str, Any]) -> Any:
    """Return the tokens that fit into the context by a ``config.json``. Any: what is not stretched stays as it is.

    As in vLLM: YaRN and linear scaling by a factor allow so many times more than ``max_position_embeddings`` says,
    where that is not stretched already. Gemma 3 and llama3 scaling say the stretched length.
    """
    said = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if type(said) is not int or not isinstance(rope, Mapping):
        return said
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    is_gemma = str(config.get("model_type")).startswith("gemma3")
    if kind not in _STRETCHING or is_gemma or not isinstance(factor, int | float) or not math.isfinite(factor):
        return said
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return max(said, int((original if type(original) is int else said) * factor))
