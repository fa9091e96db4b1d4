"""A call as an object of JSON with a name and arguments, which most forms have inside their markers.

Owns the keys under which models write them. Their order does not matter; arguments are given as they come where the
name came before.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from services.gateway.model_formats.text_reader import NotACall, Reading, TextReader

_ARGUMENT_KEYS: Final = ("arguments", "parameters")
# What models write beside, and what is of no use: ids are the gateway's, and all tools are functions.
_OTHER_KEYS: Final = ("id", "type")


def read_call_object(reader: TextReader, names: Collection[str]) -> Reading[None]:
    """Read one call of one of ``names``; raises NotACall where there is none, also for other names."""
    yield from reader.expect("{")
    name: str | None = None
    held: list[str] = []  # Arguments that came before the name.
    is_begun = False
    while True:
        key = yield from _key(reader)
        if key == "name":
            name = yield from reader.json_string()
            if name not in names:
                raise NotACall
        elif key in _ARGUMENT_KEYS and name is not None:
            if (yield from reader.peek()) != "{":
                raise NotACall
            reader.begin_call(name)
            is_begun = True
            if not (yield from reader.json_object(reader.give_arguments)):
                raise NotACall
        elif key in _ARGUMENT_KEYS:
            if not (yield from reader.json_object(held.append)):
                raise NotACall
        elif key in _OTHER_KEYS:
            yield from reader.json_string()
        else:
            raise NotACall
        yield from reader.skip_space()
        if not (yield from reader.skip(",")):
            break
    yield from reader.expect("}")
    if name is None:
        raise NotACall
    if not is_begun:
        reader.begin_call(name)
        # A function without parameters may be called without arguments.
        reader.give_arguments("".join(held) or "{}")


def _key(reader: TextReader) -> Reading[str]:
    yield from reader.skip_space()
    key = yield from reader.json_string()
    yield from reader.skip_space()
    yield from reader.expect(":")
    yield from reader.skip_space()
    return key
