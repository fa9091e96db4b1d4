"""What of a JSON schema is not handed to the compiler: it would not return, end the process, or be held wrongly.

Owns bounds that were found by trying llguidance 1.9 with a stack of 8 MiB: it follows references and nesting by
recursion, and dies beyond some 2,500 levels; its proof that patterns can hold together takes time that doubles with
each, 60 ms for 16 and minutes for 24; it keeps bounds of numbers as doubles, and integers in 64 bits. It must not
know tokens.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

import orjson

from libs.errors import InvalidRequest
from libs.grammar.schema_parts import schemas_in

MAX_SCHEMA_DEPTH: Final = 64
MAX_SCHEMA_LEVELS: Final = 1024
MAX_JOINED_PATTERNS: Final = 8
# Larger ones make more states than a step may have, beside bounds earlier, and every answer ends in an error.
MAX_MULTIPLE_OF: Final = 32_768
MAX_BOUNDED_MULTIPLE_OF: Final = 16_384

_LOWER_BOUNDS: Final = ("minimum", "exclusiveMinimum")
_BOUNDS: Final = (*_LOWER_BOUNDS, "maximum", "exclusiveMaximum")
_INTEGER_LIMIT: Final = 2**63
# Keywords that bring another schema for the same value, and those that hold nothing.
_JOINING: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_NOTES: Final = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator"}
    | {"examples", "readOnly", "title", "writeOnly"}
)
# Any number that is not exact as a double has so many digits or an exponent.
_LONG_NUMBER: Final = re.compile(rb"[0-9]{16}|[0-9]e")
# A pattern that is nothing but names.
_ONLY_NAMES: Final = re.compile(r"\^(?:\((?:\?:)?([\w|-]+)\)|([\w-]+))\$")
_ALL_PLACES: Final = ""


def check_schema_limits(schema: Mapping[str, Any]) -> None:  # Any: a JSON document, here and below.
    """Refuse a schema, no deeper than ``MAX_SCHEMA_DEPTH``, that the compiler cannot be trusted with.

    Raises:
        InvalidRequest: too many levels or joined patterns, or numbers that it would not hold; says where.
    """
    text = orjson.dumps(schema)
    # Most schemas have little of what is counted, and a look at their text is a tenth of the work.
    num_levels = _num_levels(schema) if b'"$ref"' in text else 0
    if num_levels > MAX_SCHEMA_LEVELS:
        raise InvalidRequest(
            f"A schema and what its references name have at most {MAX_SCHEMA_LEVELS} levels in all; these have "
            f"{num_levels}."
        )
    has_many_patterns = text.count(b'"pattern"') + text.count(b'"format"') > MAX_JOINED_PATTERNS
    num_patterns = _num_joined_patterns(schema) if has_many_patterns else 0
    if num_patterns > MAX_JOINED_PATTERNS:
        raise InvalidRequest(
            f"Where a schema joins parts, by 'allOf' or beside '$ref', 'anyOf' or 'oneOf', at most "
            f"{MAX_JOINED_PATTERNS} different 'pattern's and 'format's can stand for one property, or in items and "
            f"definitions; these are {num_patterns}."
        )
    has_rare_keywords = b'"patternProperties"' in text or b'"multipleOf"' in text
    if has_rare_keywords or _LONG_NUMBER.search(text) is not None:
        for path, part in schemas_in(schema):
            _check_numbers(path, part)
            _check_pattern_names(path, part)


def _num_levels(schema: Mapping[str, Any]) -> int:
    """Return more levels than recursion that enters each referenced part once can reach."""
    depths = _depths(schema)
    references = {part["$ref"] for _, part in schemas_in(schema) if isinstance(part.get("$ref"), str)}
    # What is not found may be named in other ways, and is taken to be as deep as any.
    targets = (_target(schema, reference) for reference in references)
    return depths[id(schema)] + sum(depths.get(id(target), MAX_SCHEMA_DEPTH) for target in targets)


def _depths(document: Any) -> dict[int, int]:
    """Return of each object and list, by its identity, how many levels it has."""
    depths: dict[int, int] = {}
    pending: list[tuple[Any, bool]] = [(document, False)]
    while pending:
        value, are_parts_known = pending.pop()
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        if parts is None:
            continue
        if are_parts_known:
            depths[id(value)] = 1 + max((depths.get(id(part), 0) for part in parts), default=0)
        else:
            pending.append((value, True))
            pending.extend((part, False) for part in parts)
    return depths


def _target(schema: Any, reference: str) -> Any:
    """Return what a reference within the document names; None where that is not told by its path."""
    pointer = unquote(reference.partition("#")[2])
    value = schema
    for name in pointer.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        else:
            has_item = isinstance(value, list) and key.isdecimal() and int(key) < len(value)
            value = value[int(key)] if has_item else None
    return value


def _num_joined_patterns(schema: Mapping[str, Any]) -> int:
    """Return how many patterns may have to be met together at most, 0 where parts are not joined.

    Only those of one property can meet, and those whose property is not told by their place.
    """
    parts = [*schemas_in(schema)]
    if not any(_joins(part) for _, part in parts):
        return 0
    found: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for path, part in parts:
        found[_property_of(path)].update(_patterns_of(part))
    everywhere = found[_ALL_PLACES]
    return max(len(everywhere | some) for some in found.values())


def _joins(part: Mapping[str, Any]) -> bool:
    keywords = part.keys() - _NOTES
    branches = part.get("allOf")
    has_branches = isinstance(branches, list) and len(branches) > 1
    return has_branches or (len(keywords) > 1 and not keywords.isdisjoint(_JOINING))


def _patterns_of(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for keyword in ("pattern", "format"):
        if isinstance(part.get(keyword), str):
            yield keyword, part[keyword]


def _property_of(path: str) -> str:
    """Return the property whose value a schema at this place is for, ``_ALL_PLACES`` where it may be any."""
    name = _ALL_PLACES
    steps = iter(path.split("/")[1:])
    for keyword in steps:
        if keyword == "properties":
            name = f"/{next(steps, '')}"
        elif keyword in _JOINING:
            next(steps, "")  # the branch
        else:
            name = _ALL_PLACES
            if keyword in ("$defs", "definitions", "patternProperties"):
                next(steps, "")
    return name


def _check_numbers(path: str, part: Mapping[str, Any]) -> None:
    for keyword in _BOUNDS:
        value = part.get(keyword, 0)
        if type(value) in (int, float) and not _is_held(value, is_lower=keyword in _LOWER_BOUNDS):
            raise InvalidRequest(
                f"The {keyword!r} at {path!r} cannot be held exactly; integers from -(2**53) to 2**53 can."
            )
    multiple = part.get("multipleOf", 0)
    is_bounded = any(keyword in part for keyword in _BOUNDS)
    max_multiple = MAX_BOUNDED_MULTIPLE_OF if is_bounded else MAX_MULTIPLE_OF
    if type(multiple) in (int, float) and multiple > max_multiple:
        beside = " beside bounds" if is_bounded else ""
        raise InvalidRequest(f"The 'multipleOf' at {path!r} is more than {max_multiple}{beside}.")
    options = part.get("enum")
    for value in (part.get("const"), *(options if isinstance(options, list) else ())):
        if type(value) in (int, float) and abs(value) >= 2 * _INTEGER_LIMIT:
            raise InvalidRequest(
                f"A number of 'const' or 'enum' at {path!r} cannot be held exactly; it needs more than 64 bits."
            )


def _is_held(value: float, *, is_lower: bool) -> bool:
    """Tell whether a bound is exact as a double and fits 64 bits, or allows all larger integers that do."""
    if not is_lower and value >= _INTEGER_LIMIT - 1:
        return True
    return abs(value) < _INTEGER_LIMIT and (isinstance(value, float) or int(float(value)) == value)


def _check_pattern_names(path: str, part: Mapping[str, Any]) -> None:
    """Refuse a pattern that names only properties: without them none is left, which ends answers in the middle."""
    names, patterns = part.get("properties"), part.get("patternProperties")
    if not isinstance(names, dict) or not isinstance(patterns, dict):
        return
    for pattern in patterns:
        match = _ONLY_NAMES.fullmatch(pattern)
        if match is not None and names.keys() >= {*(match[1] or match[2]).split("|")}:
            raise InvalidRequest(
                f"The 'patternProperties' at {path!r} have {pattern!r}, which matches only what 'properties' has; "
                "say it there."
            )
