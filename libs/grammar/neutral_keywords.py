"""Keywords of JSON schemas with values that hold nothing, which the compiler would refuse all the same.

Owns which these are; libraries write them for every set, list or mapping. It must not know tokens.
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


def without_neutral_keywords(schema: Any) -> Any:
    """Return a schema that means the same, without these keywords; it must not be deep."""
    return with_schemas(schema, _without)


def _without(part: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in part.items() if not (key in _NEUTRAL and _NEUTRAL[key](value))}
