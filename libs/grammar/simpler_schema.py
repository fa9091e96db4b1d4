"""Schemas that mean the same in words that the compiler takes.

Owns what libraries write for every set, list or mapping and the compiler would refuse: keywords with values that
hold nothing, and ``oneOf`` where it is ``anyOf``. It must not know tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from libs.grammar.schema_parts import with_schemas


def _is_any_name(value: Any) -> bool:  # Any: a value of a JSON document, here and below.
    """Tell whether a schema holds for all names of properties, which are strings."""
    if not isinstance(value, dict):
        return value is True
    return value.keys() <= {"type"} and value.get("type", "string") == "string"


def _is(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(one) and value == one for one in neutral)


_NEUTRAL: Final[Mapping[str, Callable[[Any], bool]]] = {
    "dependencies": _is({}),
    "dependentRequired": _is({}),
    "dependentSchemas": _is({}),
    "not": _is(False),
    "propertyNames": _is_any_name,
    "unevaluatedItems": _is(True, {}),
    "unevaluatedProperties": _is(True, {}),
    "uniqueItems": _is(False),
}
_QUOTED: Final = tuple(f'"{keyword}"'.encode() for keyword in (*_NEUTRAL, "oneOf"))


def may_be_simpler(schema_json: bytes) -> bool:
    """Tell whether a schema as JSON, without escapes in its keywords, may have any of these words; few have."""
    return any(keyword in schema_json for keyword in _QUOTED)


def simpler_schema(schema: Any) -> Any:
    """Return a schema that means the same, in other words; it must not be deep."""
    return with_schemas(schema, _simpler)


def _simpler(part: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = {key: value for key, value in part.items() if not (key in _NEUTRAL and _NEUTRAL[key](value))}
    if "oneOf" in kept and "anyOf" not in kept and _are_apart(kept["oneOf"]):
        # Of branches with no value in common at most one can hold.
        return {"anyOf" if key == "oneOf" else key: value for key, value in kept.items()}
    return kept


def _are_apart(branches: Any) -> bool:
    """Tell whether each branch names its values, and no value is of two."""
    if not isinstance(branches, list):
        return False
    values: list[tuple[bool, Any]] = []
    for branch in branches:
        named = _named_values(branch)
        if not isinstance(named, list) or any(isinstance(value, dict | list) for value in named):
            return False
        # In Python true is 1, and so is 1.0; in JSON only the latter.
        values += {(isinstance(value, bool), value) for value in named}
    return len(set(values)) == len(values)


def _named_values(branch: Any) -> Any:
    if not isinstance(branch, dict):
        return None
    return [branch["const"]] if "const" in branch else branch.get("enum")
