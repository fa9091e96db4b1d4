"""A large JSON text is read in pieces, between which others get their turn.

Owns how a text is divided. msgspec keeps the interpreter from all others until it has read what it is given, which
takes 4 to 6 ms where 1 MB holds many small values. To find where values begin and end takes a fifth of that.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, TypeAlias

import msgspec

# Reading so much takes up to 0.4 ms.
_PIECE_BYTES: Final = 65_536
# Values of which so many are a piece are small.
_MANY: Final = 64
# Requests nest large values no deeper; what lies below is read at once.
_MAX_DEPTH: Final = 8
# By these an array or an object is known. One that begins with more white space is read at once.
_FIRST_BYTES: Final = 64

# Yields after each piece and returns the value.
InPieces: TypeAlias = Generator[None, None, Any]  # Any: JSON of any shape.
_Text: TypeAlias = bytes | bytearray | memoryview

_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY: Final = msgspec.json.Decoder(list[msgspec.Raw])
_VALUES: Final = msgspec.json.Decoder(list[Any])
_ANY: Final = msgspec.json.Decoder()


def decode_in_pieces(text: _Text, depth: int = 0) -> InPieces:
    """Read a JSON text as ``msgspec.json.decode`` does.

    Raises:
        msgspec.DecodeError, RecursionError: as that does.
    """
    first_bytes = bytes(text[:_FIRST_BYTES]).split()
    if len(text) <= _PIECE_BYTES or depth == _MAX_DEPTH or not first_bytes:
        return _ANY.decode(text)
    if first_bytes[0].startswith(b"{"):
        members = _OBJECT.decode(text)
        yield
        values = yield from _decode_all(list(members.values()), len(text), depth + 1)
        return dict(zip(members, values, strict=True))
    if first_bytes[0].startswith((b"[[", b"[{")):
        items = _ARRAY.decode(text)
        yield
        return (yield from _decode_all(items, len(text), depth + 1))
    # Only what was part of another value is known to be right.
    if depth and first_bytes[0].startswith(b"[") and _is_flat(numbers := bytes(text)):
        return (yield from _decode_numbers(numbers))
    return _ANY.decode(text)


def _decode_all(texts: list[msgspec.Raw], num_bytes: int, depth: int) -> InPieces:
    """Read values, which have so many bytes together: small ones many at a time, others one after the other."""
    values: list[Any] = []
    num_at_once = _PIECE_BYTES * len(texts) // num_bytes
    if num_at_once > _MANY:
        for start in range(0, len(texts), num_at_once):
            values += _VALUES.decode(b"[%b]" % b",".join(texts[start : start + num_at_once]))
            yield
        return values
    num_bytes_read = 0
    for raw in texts:
        text = memoryview(raw)
        values.append((yield from decode_in_pieces(text, depth)))
        num_bytes_read += len(text)
        if num_bytes_read >= _PIECE_BYTES:
            num_bytes_read = 0
            yield
    return values


def _is_flat(raw: bytes) -> bool:
    """Tell whether an array holds only numbers, true, false and null."""
    return all(raw.find(mark, 1) < 0 for mark in (b'"', b"[", b"{"))


def _decode_numbers(raw: bytes) -> InPieces:
    """Read a flat array that is known to be right: each comma divides it."""
    values: list[Any] = []
    start = 1
    while (end := raw.find(b",", start + _PIECE_BYTES)) >= 0:
        values += _VALUES.decode(b"[%b]" % raw[start:end])
        start = end + 1
        yield
    values += _VALUES.decode(b"[" + raw[start:])
    return values
