"""An answer with its latency receipt.

Owns where the receipt stands: in a field ``timings`` of a whole answer, and of a stream's last event. It knows no
dialect: whatever shape an answer has, it is an object of JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from services.gateway.answer_format import AnswerFormat, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.client_call import Framing
from services.gateway.latency_receipt import Segment
from services.gateway.request_times import RequestTimes

_EVENT_END: Final = b"}\n\n"
_OBJECT_END: Final = b"}"


class ReceiptFormat:
    """Another format, with a receipt at the end. A stream always ends with the event of the counts then."""

    includes_usage = True

    def __init__(self, inner: AnswerFormat, times: RequestTimes) -> None:
        self._inner = inner
        self._times = times

    @property
    def framing(self) -> Framing:
        """What a stream has around its events."""
        return self._inner.framing

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a stream for a delta."""
        return self._inner.events(delta)

    def text_template(self, choice_index: int) -> None:
        """Return nothing: where times are told, all tokens take the way of which they tell."""

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return the events that end a stream, the last one with the receipt."""
        return self._with_receipt(self._inner.usage_event(counts), _EVENT_END)

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Return a whole answer with the receipt."""
        return self._with_receipt(self._inner.body(choices, counts), _OBJECT_END)

    def _with_receipt(self, data: bytes, end: bytes) -> bytes:
        assert data.endswith(end), "an answer ends with an object"
        self._times.lap(Segment.FORMAT)
        self._times.is_told = True
        receipt = orjson.dumps(self._times.receipt().as_json())
        return data.removesuffix(end) + b',"timings":' + receipt + end
