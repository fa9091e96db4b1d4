"""The schemas within a JSON schema: which parts of the document are schemas, and where they stand.

Owns the difference between keywords and names that look like them. It must not know what keywords mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

# Keywords whose values are no schemas, and those whose values are schemas by name.
_VALUES: Final = frozenset({"const", "default", "enum", "examples", "required"})
_BY_NAME: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def schemas_in(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:  # Any: a JSON document, here and below.
    """Give a schema and those within it, with their places; the size of a schema bounds them."""
    pending: deque[tuple[str, Any]] = deque([("#", schema)])
    while pending:
        path, part = pending.popleft()
        if isinstance(part, list):
            pending.extend((f"{path}/{index}", item) for index, item in enumerate(part))
        if not isinstance(part, dict):
            continue
        yield path, part
        for key, value in part.items():
            if key in _BY_NAME and isinstance(value, dict):
                pending.extend((f"{path}/{key}/{_escaped(name)}", item) for name, item in value.items())
            elif key not in _VALUES:
                pending.append((f"{path}/{_escaped(key)}", value))


def with_schemas(schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Return a schema in which it and each within it is what ``change`` makes of it; not for deep ones."""
    if isinstance(schema, list):
        return [with_schemas(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _changed(key, value, change) for key, value in change(schema).items()}


def _changed(key: str, value: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    if key in _VALUES:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: with_schemas(item, change) for name, item in value.items()}
    return with_schemas(value, change)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
