"""Where a statement ends and its data begins. Pure functions over bytes.

The engine stops reading data that stands in a statement at 256 KiB, so an INSERT is cut here: the engine gets
its statement and, apart from it, its data. This module reads tokens, not grammar: whether a statement is valid
is the engine's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from services.telemetry.embedded_clickhouse.errors import SYNTAX_ERROR, ClickHouseError

_TOKEN: Final = re.compile(
    rb"""
      (?P<blank>    \s+ | --[^\n]* | \#[\ !][^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<quoted>   '(?:\\.|''|[^'\\])*(?:'|\Z) | "(?:\\.|""|[^"\\])*(?:"|\Z) | `(?:\\.|``|[^`\\])*(?:`|\Z)
                  | \$(?P<tag>\w*)\$.*?(?:\$(?P=tag)\$|\Z) )
    | (?P<word>     [A-Za-z_]\w* )
    | (?P<other>    \d\w* | . )
    """,
    re.VERBOSE | re.DOTALL,
)
# Results come from these; all other statements answer with nothing, which clients tell apart by a header.
_WITH_RESULT: Final = frozenset(
    (b"SELECT", b"WITH", b"SHOW", b"DESCRIBE", b"DESC", b"EXISTS", b"EXPLAIN", b"CHECK", b"FROM", b"(")
)
_INSERT_FROM_QUERY: Final = frozenset((b"SELECT", b"WITH", b"FROM", b"WATCH"))


@dataclass(frozen=True, slots=True)
class Query:
    """A statement without data of its own. `result_format` is what it names; `has_result` whether it answers."""

    text: bytes
    has_result: bool
    result_format: str | None


@dataclass(frozen=True, slots=True)
class InsertWithData:
    """An INSERT whose rows follow it, in an input format: ``target [settings] FORMAT input_format data``."""

    target: bytes
    settings: bytes
    input_format: bytes
    data: bytes

    def reading_from(self, path: str) -> bytes:
        """Return the statement that takes its rows from a file."""
        parts = (self.target, b"FROM INFILE '" + path.encode() + b"'", self.settings, b"FORMAT", self.input_format)
        return b" ".join(parts)


@dataclass(frozen=True, slots=True)
class _Token:
    word: bytes  # Upper case; empty for what is quoted.
    start: int
    end: int


def parse_statement(text: bytes) -> Query | InsertWithData:
    """Cut the data off an INSERT; refuse more than one statement."""
    tokens = _tokens(text)
    first = next(tokens, None)
    if first is None:
        raise ClickHouseError.of(SYNTAX_ERROR, "Empty query")
    if first.word == b"INSERT":
        insert = _find_data(text, tokens)
        if insert is not None:
            return insert
        tokens = _tokens(text)
    result_format: str | None = None
    previous = first
    for token in tokens:
        if previous.word == b";":
            raise ClickHouseError.of(SYNTAX_ERROR, "Multi-statements are not allowed; send one at a time")
        if previous.word == b"FORMAT":
            result_format = text[token.start : token.end].decode("ascii", "replace")
        previous = token
    return Query(text, first.word in _WITH_RESULT, result_format)


def _find_data(text: bytes, tokens: Iterator[_Token]) -> InsertWithData | None:
    """Find where the rows of an INSERT begin; None when its rows come from a query or a file."""
    is_name_next = False
    settings_start: int | None = None
    for token in _outside_parentheses(tokens):
        if is_name_next and token.word not in (b"TABLE", b"FUNCTION"):
            is_name_next = False  # A table may be called like a keyword.
        elif token.word in (b"INTO", b"."):
            is_name_next = True
        elif token.word == b"SETTINGS":
            settings_start = token.start
        elif token.word in _INSERT_FROM_QUERY or token.word == b";":
            return None
        elif token.word in (b"VALUES", b"FORMAT"):
            target_end = token.start if settings_start is None else settings_start
            target, settings = text[:target_end], text[target_end : token.start]
            if token.word == b"VALUES":
                return InsertWithData(target, settings, b"Values", text[token.end :])
            name = next(tokens, None)
            if name is None:
                return None
            input_format, data = text[name.start : name.end], text[_data_start(text, name.end) :]
            return InsertWithData(target, settings, input_format, data)
    return None


def _outside_parentheses(tokens: Iterator[_Token]) -> Iterator[_Token]:
    depth = 0
    for token in tokens:
        if token.word == b"(":
            depth += 1
        elif token.word == b")":
            depth -= 1
        elif depth == 0:
            yield token


def _data_start(text: bytes, offset: int) -> int:
    """Skip what may stand between the name of a format and the data: blanks and one line feed."""
    while text[offset : offset + 1] in (b" ", b"\t", b"\f"):
        offset += 1
    if text[offset : offset + 1] == b"\r":
        offset += 1
    if text[offset : offset + 1] == b"\n":
        offset += 1
    return offset


def _tokens(text: bytes) -> Iterator[_Token]:
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "blank":
            continue
        word = b"" if match["quoted"] is not None else match[0].upper()
        yield _Token(word, match.start(), match.end())
