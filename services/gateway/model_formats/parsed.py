"""What a model's answer is made of once its own markers are read: text, reasoning, and parts of calls.

Owns no behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call: with its first the function's name, then pieces of its arguments."""

    call_index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What became certain: text for the reader, reasoning, and parts of calls."""

    content: str
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


def split_calls(calls: Sequence[CallDelta]) -> tuple[Sequence[CallDelta], Sequence[CallDelta]]:
    """Return what goes on with the call that has begun before, and the calls that begin.

    Text that came together with both stands between them at the earliest.
    """
    first_new = next((index for index, call in enumerate(calls) if call.name is not None), len(calls))
    return calls[:first_new], calls[first_new:]


class OutputParser(Protocol):
    """Takes one answer's text. However it is cut into pieces, the same comes out."""

    def add(self, text: str, *, is_last: bool) -> ParsedText:
        """Take the next text; with the last, what was held back is given."""
