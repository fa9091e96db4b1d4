"""Where in a JSON schema that lies which cannot be enforced.

Owns the reading of the compiler's reasons: it tells a keyword, and clients need its place. It must not know tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import orjson

_UNIMPLEMENTED: Final = re.compile(r'Unimplemented keys: \["([^"]+)"')
_UNKNOWN_FORMAT: Final = re.compile(r"Unknown format: (.+?)\.?$", re.MULTILINE)
# Keywords whose values are no schemas, and those whose values are schemas by name.
_VALUES: Final = frozenset({"const", "default", "enum", "examples", "required"})
_BY_NAME: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def explained(schema_text: str, reason: str) -> str:
    """Return the compiler's reason with the place of what it is about, where that can be told."""
    schema = orjson.loads(schema_text)
    if match := _UNIMPLEMENTED.search(reason):
        keyword = match[1]
        return f"the keyword {keyword!r}{_place(schema, lambda part: keyword in part)} is not supported"
    if match := _UNKNOWN_FORMAT.search(reason):
        name = match[1]
        return f"the 'format' {name!r}{_place(schema, lambda part: part.get('format') == name)} is not known"
    if reason.startswith("oneOf constraints"):
        place = _place(schema, lambda part: "oneOf" in part)
        return (
            f"the branches of 'oneOf'{place} may hold together; use 'anyOf', or give each another 'const' or type"
        )
    return reason


def _place(schema: Any, is_meant: Callable[[Mapping[str, Any]], bool]) -> str:
    """Return the place of the first part that is meant, as a JSON pointer; nothing where there is none."""
    found = (path for path, part in _schemas_in(schema) if is_meant(part))
    path = next(found, None)
    return "" if path is None else f" at {path!r}"


def _schemas_in(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give a schema and those within it, with their places; the size of a schema bounds them."""
    pending: list[tuple[str, Any]] = [("#", schema)]
    while pending:
        path, part = pending.pop(0)
        if isinstance(part, list):
            pending += [(f"{path}/{index}", item) for index, item in enumerate(part)]
        if not isinstance(part, dict):
            continue
        yield path, part
        for key, value in part.items():
            if key in _BY_NAME and isinstance(value, dict):
                pending += [(f"{path}/{key}/{_escaped(name)}", item) for name, item in value.items()]
            elif key not in _VALUES:
                pending.append((f"{path}/{_escaped(key)}", value))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
