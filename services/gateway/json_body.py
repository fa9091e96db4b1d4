"""The JSON object of a request: counted while its bytes come, and read when all are there.

Owns how many values a body may have and what counts as JSON. It must not know HTTP.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from libs.errors import InvalidRequest
from services.gateway.json_pieces import InPieces, decode_in_pieces
from services.gateway.openai_schema import MAX_MESSAGES

# Beyond what 2048 messages, 2048 parts and the largest schema can have.
MAX_BODY_MEMBERS: Final = 65_536
MAX_BODY_COMMAS: Final = 524_288
_LARGE_BYTES: Final = 65_536
# More white space than a client puts after an object.
_ENDING_BYTES: Final = 64


class JsonBody:
    """A body as it comes. Each part is looked at by itself, so that a large body never takes long at once.

    Of a body with more values than any request needs, no more is kept.
    """

    def __init__(self) -> None:
        self._raw = bytearray()
        self._num_quotes = 0
        self._num_commas = 0
        self._num_members = 0
        # Up to here members were counted.
        self._num_counted_bytes = 0
        self._refusal: InvalidRequest | None = None

    @property
    def num_bytes(self) -> int:
        """How much there is to read."""
        return len(self._raw)

    def add(self, data: bytes) -> None:
        """Take the bytes that came next."""
        if self._refusal is not None:
            return
        self._raw += data
        # To find single bytes takes a fifth of the time that it takes to find members, each of which has a quote.
        self._num_quotes += data.count(b'"')
        # A comma may also stand in text, so that limit is wide.
        self._num_commas += data.count(b",")
        if self._num_quotes > MAX_BODY_MEMBERS:
            self._count_members()
        self._refusal = self._refusal_so_far()
        if self._refusal is not None:
            self._raw = bytearray()

    def parse(self) -> dict[str, Any]:
        """Return the object at once; raises as ``parse_in_pieces`` does."""
        pieces = self.parse_in_pieces()
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                fields: dict[str, Any] = end.value
                return fields

    def parse_in_pieces(self) -> InPieces:
        """Return the object, which must be in UTF-8, by and by; NaN, Infinity and lone surrogates are not JSON.

        Raises:
            InvalidRequest: it is no such object, or has too many values.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._is_cut():
            raise InvalidRequest("The body is not valid JSON: its object has no end.")
        try:
            with _without_collector():
                # orjson first copies a body, into new memory of twelve times its size.
                body = yield from decode_in_pieces(self._raw)
        except RecursionError as error:
            raise InvalidRequest("The body is nested too deep; no request needs so many levels.") from error
        except msgspec.DecodeError as error:
            reason = str(error).partition(" - at `")[0]
            raise InvalidRequest(f"The body is not valid JSON: {reason}.") from error
        if not isinstance(body, dict):
            raise InvalidRequest("The body must be a JSON object.")
        return body

    def _is_cut(self) -> bool:
        """Tell whether a large body ends within its object; to find that out by reading takes twice the time."""
        ending = self._raw[-_ENDING_BYTES:].rstrip()
        return len(self._raw) > _LARGE_BYTES and bool(ending) and not ending.endswith((b"}", b"]"))

    def _count_members(self) -> None:
        """Count the members that came since the last time; only what stands for structure is one."""
        start = self._num_counted_bytes
        self._num_members += self._count(b'":', start) - self._count(b'\\":', start)
        self._num_counted_bytes = len(self._raw)

    def _count(self, pattern: bytes, start: int) -> int:
        """Count what ends at ``start`` or behind it; a pattern may have begun in the part before."""
        return self._raw.count(pattern, max(0, start - len(pattern) + 1))

    def _refusal_so_far(self) -> InvalidRequest | None:
        if self._num_members > MAX_BODY_MEMBERS:
            # A conversation is the likeliest, and the only part of a body that may rightly be large.
            is_conversation = self._raw.count(b'"role"') > MAX_MESSAGES
            return InvalidRequest(
                f"The body's objects have too many members; at most {MAX_BODY_MEMBERS} are taken.",
                param="messages" if is_conversation else None,
            )
        if self._num_commas > MAX_BODY_COMMAS:
            return InvalidRequest(
                f"The body has more than {MAX_BODY_COMMAS} commas, which are more values than are taken."
            )
        return None


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep Python's collector from looking through all objects again and again while many are made at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
