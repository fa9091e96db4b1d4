"""The model's own values of sampling, which take the place of what a request leaves out.

Owns their check and where they go. It must not know which files say them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libs.errors import InvalidRequest, ModelLoadFailed
from services.gateway.generation_options import parse_generation_options


def checked_sampling_defaults(values: Mapping[str, Any], vocab_size: int) -> Mapping[str, Any]:
    """Return the values that the model's files say, if a request could say them; ``top_k`` may also be more.

    Raises:
        ModelLoadFailed: one could not be served; names it and says what to do.
    """
    top_k = values.get("top_k")
    if isinstance(top_k, int) and top_k > vocab_size:
        values = {**values, "top_k": vocab_size}
    try:
        parse_generation_options(values, vocab_size=vocab_size, max_output_tokens=None)
    except InvalidRequest as error:
        raise ModelLoadFailed(
            f"The model's generation_config.json, or its general.sampling keys, cannot be served: {error.message} "
            "Correct them, or set gateway.generation_config to none."
        ) from error
    return dict(values)
