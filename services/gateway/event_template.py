"""The event of a stream that is the same for each token but for its text.

Owns how such an event is written fast. It must not know the shape of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from services.gateway.sse import event, named_event, one_line

_MARK: Final = "\x00mark\x00"


class ChunkTemplate:
    """The event of one choice for any text, cut from a chunk that is made once."""

    def __init__(self, make_chunk: Callable[[str], dict[str, Any]], *, name: str | None = None) -> None:
        chunk = orjson.dumps(make_chunk(_MARK))
        whole = event(chunk) if name is None else named_event(name, chunk)
        self._before_text, self._after_text = whole.split(json_text(_MARK))

    def event_of(self, text: str) -> bytes:
        """Return the event."""
        return self.event_of_json(json_text(text))

    def event_of_json(self, text: bytes) -> bytes:
        """Return the event for a text that is escaped already, as ``json_text`` does."""
        return b"".join((self._before_text, text, self._after_text))


def json_text(text: str) -> bytes:
    """Return what stands between the quotes of a JSON string in an event."""
    return one_line(orjson.dumps(text)[1:-1])
