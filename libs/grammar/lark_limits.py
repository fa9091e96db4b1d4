"""What of a grammar in Lark is not handed to the compiler: it would not return, or end the process.

Owns the reading of its tokens as far as limits need it, and the limits, found by trying llguidance 1.9: it follows
rules by recursion and dies beyond some 2,500, and its time doubles with each ``&``. It knows no meaning of rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from libs.errors import InvalidRequest

MAX_RULES: Final = 1024
MAX_JOINED_TERMS: Final = 8

# A comment, a string, an expression, or the beginning of a document of JSON.
_TOKEN: Final = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\])+/|(%\w+)\s*(?=\{)', re.DOTALL)
_SCHEMA: Final = "%json"


def check_lark_limits(grammar: str, check_schema: Callable[[Any], None]) -> None:  # Any: a JSON document.
    """Refuse a grammar that the compiler cannot be trusted with; schemas in it are left to ``check_schema``.

    Raises:
        InvalidRequest: too many rules or joined terms, or what stands behind ``%json`` is no JSON.
    """
    plain = "".join(_plain_text(grammar, check_schema))
    num_rules, num_joined = plain.count(":"), plain.count("&")
    if num_rules > MAX_RULES:
        raise InvalidRequest(f"A grammar has at most {MAX_RULES} rules; this one has {num_rules}.")
    if num_joined > MAX_JOINED_TERMS:
        raise InvalidRequest(f"A grammar has at most {MAX_JOINED_TERMS} times '&'; this one has {num_joined}.")


def _plain_text(grammar: str, check_schema: Callable[[Any], None]) -> Iterator[str]:
    """Give what stands between comments, strings, expressions and documents."""
    position = 0
    while (match := _TOKEN.search(grammar, position)) is not None:
        yield grammar[position : match.start()]
        position = match.end()
        if match[1] is not None:
            document, position = _document(grammar, position, match[1])
            if match[1] == _SCHEMA:
                check_schema(document)
    yield grammar[position:]


def _document(grammar: str, position: int, directive: str) -> tuple[Any, int]:
    """Return the JSON that begins at a place, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(grammar, position)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"Behind '{directive}' must stand JSON: {error}.") from error
