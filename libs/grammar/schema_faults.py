"""Where in a JSON schema that lies which cannot be enforced.

Owns the reading of the compiler's reasons: it tells a keyword, and clients need its place. It must not know tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from libs.grammar.schema_parts import schemas_in

# The compiler is given a schema as a part of a grammar, of which nobody else knows.
_AROUND_REASON: Final = re.compile(
    r"^at 1\(\d+\): failed to compile JSON schema: |\n +1 \| start: %json .*", re.DOTALL
)
_UNIMPLEMENTED: Final = re.compile(r'Unimplemented keys: \["([^"]+)"')
_UNKNOWN_FORMAT: Final = re.compile(r"Unknown format: (.+?)\.?$", re.MULTILINE)


def explained(schema_text: str, reason: str) -> str:
    """Return the compiler's reason with the place of what it is about, where that can be told."""
    schema, reason = orjson.loads(schema_text), _AROUND_REASON.sub("", reason)
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
    found = (path for path, part in schemas_in(schema) if is_meant(part))
    path = next(found, None)
    return "" if path is None else f" at {path!r}"
