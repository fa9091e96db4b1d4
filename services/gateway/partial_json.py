"""The object that the beginning of a JSON object holds for certain.

Owns where a text that was cut can be closed. It must not know why it was cut.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

_CLOSERS: Final = {"{": "}", "[": "]"}
# A value that ends so is complete; a number might have gone on.
_COMPLETE_ENDS: Final = ('"', "}", "]", "e", "l")


def complete_object(text: str) -> dict[str, Any]:
    """Return an object from its whole text, or from the beginning of it without what is not complete."""
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
    for beginning, brackets in candidates:
        closed = beginning + "".join(_CLOSERS[bracket] for bracket in reversed(brackets))
        try:
            value = orjson.loads(closed)
        except orjson.JSONDecodeError:
            continue
        return value if isinstance(value, dict) else {}
    return {}
