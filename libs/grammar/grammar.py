"""A language that an output can be held to, and the bounds of its description.

Owns what can be told without a compiler: sizes, depths, keywords that would switch enforcement off. It must not
know tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

from libs.errors import InvalidRequest
from libs.grammar.lark_limits import check_lark_limits
from libs.grammar.schema_limits import MAX_SCHEMA_DEPTH, check_schema_limits

MAX_SCHEMA_BYTES: Final = 128 * 1024
MAX_REGEX_CHARACTERS: Final = 4096
MAX_GRAMMAR_CHARACTERS: Final = 256 * 1024
MAX_LITERALS: Final = 1024
MAX_LITERAL_CHARACTERS: Final = 4096
# With it a schema could tell the compiler to leave out what it cannot enforce.
_COMPILER_OPTIONS: Final = "x-guidance"


class GrammarForm(StrEnum):
    """The ways to describe a language."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A description: one text, or for a choice the literal outputs."""

    form: GrammarForm
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        """The one text of any form but a choice."""
        (text,) = self.texts
        return text

    @property
    def num_characters(self) -> int:
        """How long the description is."""
        return sum(map(len, self.texts))


def check_grammar(grammar: Grammar) -> None:
    """Refuse a description that is larger than what is compiled.

    Raises:
        InvalidRequest: it is too large or too deep, or no JSON where that is expected.
    """
    match grammar.form:
        case GrammarForm.JSON_SCHEMA:
            _check_schema(grammar.text)
        case GrammarForm.REGEX:
            _check_regex(grammar.text)
        case GrammarForm.LARK:
            _require_length("A grammar", grammar.text, MAX_GRAMMAR_CHARACTERS)
            check_lark_limits(grammar.text, _check_schema_in_grammar)
        case GrammarForm.CHOICE:
            if not 1 <= len(grammar.texts) <= MAX_LITERALS:
                raise InvalidRequest(f"A choice has 1 to {MAX_LITERALS} strings, not {len(grammar.texts)}.")
            for literal in grammar.texts:
                _require_length("Each string of a choice", literal, MAX_LITERAL_CHARACTERS)
            _require_length("A choice as a whole", "".join(grammar.texts), MAX_GRAMMAR_CHARACTERS)


def _require_length(subject: str, text: str, max_characters: int) -> None:
    if not 1 <= len(text) <= max_characters:
        raise InvalidRequest(f"{subject} has 1 to {max_characters} characters, not {len(text)}.")


def _check_regex(text: str) -> None:
    _require_length("A regular expression", text, MAX_REGEX_CHARACTERS)
    num_backslashes = len(text) - len(text.rstrip("\\"))
    if num_backslashes % 2:
        # In the compiler's own words it would escape what ends the expression.
        raise InvalidRequest("The regular expression ends with a backslash that escapes nothing.")


def _check_schema(text: str) -> None:
    num_bytes = len(text.encode())
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"A schema has at most {MAX_SCHEMA_BYTES} bytes as JSON, not {num_bytes}.")
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The schema is not valid JSON: {error}.") from error
    if not isinstance(schema, dict):
        raise InvalidRequest("The schema must be a JSON object.")
    _check_depth(schema)
    if any(_COMPILER_OPTIONS in value for value, _ in _objects_in(schema)):
        raise InvalidRequest(f"The keyword {_COMPILER_OPTIONS!r} is not allowed in a schema.")
    check_schema_limits(schema)


def _check_schema_in_grammar(schema: Any) -> None:  # Any: a JSON document.
    _check_depth(schema)
    try:
        check_schema_limits(schema)
    except TypeError as error:
        # Such a schema comes as text, and not as a part of a body that was read.
        raise InvalidRequest("A schema has an integer of more than 64 bits or a lone surrogate.") from error


def _check_depth(schema: Any) -> None:
    if any(depth > MAX_SCHEMA_DEPTH for _, depth in _objects_in(schema)):
        raise InvalidRequest(f"A schema is nested at most {MAX_SCHEMA_DEPTH} levels deep; this one is deeper.")


def _objects_in(document: Any) -> Iterator[tuple[Mapping[str, Any], int]]:  # Any: a JSON document.
    """Give every object of a document and how many objects and lists it lies in; too deep ones once."""
    pending: list[tuple[Any, int]] = [(document, 1)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, dict):
            yield value, depth
            pending += [(part, depth + 1) for part in value.values()]
        elif isinstance(value, list):
            if depth > MAX_SCHEMA_DEPTH:
                yield {}, depth
            pending += [(part, depth + 1) for part in value]
