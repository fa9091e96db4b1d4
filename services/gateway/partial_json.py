"""The object that the beginning of a JSON object holds for certain.

Owns where a text that was cut can be closed. It must not know why it was cut.
"""

from __future__ import annotations

import json
from typing import Final

_CLOSERS: Final = {"{": "}", "[": "]"}
# A value that ends so is complete; a number might have gone on.
_COMPLETE_ENDS: Final = ('"', "}", "]", "e", "l")


def complete_object(text: str) -> str:
    """Return an object's text, or its beginning closed behind what is complete; ``{}`` for no object."""
    if _is_object(text):
        return text
    open_brackets: list[str] = []
    # Where the text can be cut, and the brackets that are open there.
    last_cut, open_at_cut = 0, ""
    is_in_string = is_escaped = False
    for index, character in enumerate(text):
        if is_in_string:
            is_in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
            continue
        match character:
            case '"':
                is_in_string = True
            case "{" | "[":
                open_brackets.append(character)
                last_cut, open_at_cut = index + 1, "".join(open_brackets)
            case "}" | "]" if open_brackets:
                open_brackets.pop()
                last_cut, open_at_cut = index + 1, "".join(open_brackets)
            case ",":
                last_cut, open_at_cut = index, "".join(open_brackets)
    candidates = [(text[:last_cut], open_at_cut)]
    if not is_in_string and text.rstrip().endswith(_COMPLETE_ENDS):
        candidates.insert(0, (text, "".join(open_brackets)))
    closed = (
        beginning + "".join(_CLOSERS[bracket] for bracket in reversed(brackets))
        for beginning, brackets in candidates
    )
    return next(filter(_is_object, closed), "{}")


def _is_object(text: str) -> bool:
    """Tell whether a text is an object of JSON, whatever characters its escapes name."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> None:
    """Refuse what Python takes and JSON does not: NaN and Infinity."""
    raise ValueError(name)
