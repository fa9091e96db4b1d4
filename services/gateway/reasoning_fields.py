"""What requests say of a model's template and of its reasoning.

Owns the fields ``chat_template_kwargs`` and ``reasoning_effort``, and how reasoning is turned on and off. It must
not know how a template is rendered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from libs.errors import InvalidRequest, UnsupportedField
from services.gateway.model_formats.model_format import ModelFormat

MAX_TEMPLATE_VARIABLES: Final = 16
MAX_TEMPLATE_VALUE_CHARACTERS: Final = 1024
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_EFFORT_VARIABLE: Final = "reasoning_effort"
_SHOWN_NAME_CHARACTERS: Final = 64


def read_template_variables(values: Any, model_format: ModelFormat) -> dict[str, Any]:
    """Return what a client sets in the template; nothing for null.

    Raises:
        InvalidRequest: a variable that the template does not read, or a value that is no single one.
    """
    path = "chat_template_kwargs"
    if values is None:
        return {}
    if not isinstance(values, dict) or len(values) > MAX_TEMPLATE_VARIABLES:
        raise InvalidRequest(
            f"'{path}' must be an object of at most {MAX_TEMPLATE_VARIABLES} variables.", param=path
        )
    for name, value in values.items():
        if name not in model_format.variables:
            known = ", ".join(sorted(model_format.variables)) or "none"
            param = f"{path}.{name[:_SHOWN_NAME_CHARACTERS]}"
            raise InvalidRequest(
                f"{param!r} is no variable of this model's template; it reads: {known}.", param=param
            )
        if not _is_single(value):
            raise InvalidRequest(
                f"'{path}.{name}' must be true, false, null, a number or a string of at most "
                f"{MAX_TEMPLATE_VALUE_CHARACTERS} characters.",
                param=f"{path}.{name}",
            )
    return dict(values)


def effort_variables(effort: Any, model_format: ModelFormat, path: str) -> dict[str, Any]:
    """Return the template's variables for OpenAI's effort; none for null.

    Raises:
        InvalidRequest: no effort that OpenAI knows.
        UnsupportedField: this model's effort cannot be set so.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidRequest(f"'{path}' must be one of {', '.join(EFFORTS)}.", param=path)
    if _EFFORT_VARIABLE in model_format.variables:
        return {_EFFORT_VARIABLE: effort}
    if effort == "none":
        return switch_variables(False, model_format, path)
    raise UnsupportedField(f"'{path}' cannot be set for this model, only 'none' or nothing.", param=path)


def switch_variables(is_on: bool, model_format: ModelFormat, path: str) -> dict[str, Any]:
    """Return the template's variables that turn reasoning on or off.

    Raises:
        UnsupportedField: the model cannot do so.
    """
    if model_format.reasoning is None:
        if is_on:
            raise UnsupportedField(f"'{path}' asks for reasoning, and this model does not reason.", param=path)
        return {}
    switch = model_format.reasoning_switch
    if switch is not None:
        return {switch: is_on}
    if not is_on:
        raise UnsupportedField(f"'{path}' cannot turn this model's reasoning off.", param=path)
    return {}


def check_reasoning_limit(model_format: ModelFormat, path: str) -> None:
    """Refuse a limit of reasoning for a model that cannot be held to it."""
    if not model_format.can_limit_reasoning:
        raise UnsupportedField(
            f"'{path}' limits reasoning, and this model does not reason or cannot be limited.", param=path
        )


def merged_variables(first: Mapping[str, Any], second: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return both; raises InvalidRequest where they differ, naming the field of the second."""
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            raise InvalidRequest(
                f"'{path}' contradicts 'chat_template_kwargs.{name}'; give one of them.", param=path
            )
    return {**first, **second}


def _is_single(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEMPLATE_VALUE_CHARACTERS
    return value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
