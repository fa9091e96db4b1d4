"""Values of a JSON request by name: booleans, numbers, integers and lists of token ids, within their bounds.

Owns the messages for a value of a wrong type or size. It must not know what a field means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from libs.errors import InvalidRequest

# Between two looks at so many values, other threads get their turn.
_VALUES_AT_ONCE: Final = 4096


def read_boolean(body: Mapping[str, Any], name: str, *, default: bool, path: str = "") -> bool:
    """Return true or false; null counts as left out."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{path}{name}' must be true or false.", param=f"{path}{name}")
    return value


def read_number(body: Mapping[str, Any], name: str, *, default: float, low: float, high: float) -> float:
    """Return a finite number from ``low`` to ``high``."""
    value = body.get(name)
    if value is None:
        return default
    if not is_number(value) or not low <= value <= high:
        raise InvalidRequest(f"'{name}' must be a number from {low:g} to {high:g}.", param=name)
    return float(value)


def read_integer(body: Mapping[str, Any], name: str, *, low: int, high: int) -> int | None:
    """Return an integer from ``low`` to ``high``, or None for none."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"'{name}' must be an integer from {low} to {high}.", param=name)
    return value


def read_token_ids(body: Mapping[str, Any], name: str, *, max_count: int, vocab_size: int) -> tuple[int, ...]:
    """Return token ids of the vocabulary, each once; none for null."""
    token_ids = body.get(name)
    if token_ids is None:
        return ()
    if not isinstance(token_ids, list) or len(token_ids) > max_count:
        raise InvalidRequest(f"'{name}' must be a list of at most {max_count} token ids.", param=name)
    if not are_token_ids(token_ids, vocab_size):
        raise InvalidRequest(f"Each of '{name}' must be an integer from 0 to {vocab_size - 1}.", param=name)
    return tuple(dict.fromkeys(token_ids))


def are_token_ids(values: list[Any], vocab_size: int) -> bool:
    """Tell whether all values are ids of the vocabulary."""
    ids: Any = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]  # Any: a type that is made here.
    try:
        for start in range(0, len(values), _VALUES_AT_ONCE):
            msgspec.convert(values[start : start + _VALUES_AT_ONCE], ids, strict=True)
    except msgspec.ValidationError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number; a boolean is an int in Python, and no number for a client."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """Return a schema as JSON; raises InvalidRequest for one that is nested deeper than a form may be."""
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError as error:
        raise InvalidRequest(f"'{param}' is nested too deep.", param=param) from error
