"""What a model's answer is made of once its own markers are read: text, reasoning, and parts of calls.

Owns no behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call: with its first the function's name, then pieces of its arguments."""

    call_index: int
    name: str | None
    arguments: str
    # How much of the text that came with it was written before it.
    num_characters_before: int = 0


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What became certain: text for the reader, reasoning, and parts of calls."""

    content: str
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class Placed(Protocol):
    """What stands somewhere in a text."""

    @property
    def num_characters_before(self) -> int:
        """Characters of the text before it."""


PlacedT = TypeVar("PlacedT", bound=Placed)


def in_order(text: str, calls: Sequence[PlacedT]) -> Iterator[str | PlacedT]:
    """Give a text in pieces, and calls or parts of them between these, as the model wrote them."""
    num_given = 0
    for call in calls:
        if piece := text[num_given : call.num_characters_before]:
            yield piece
        num_given = call.num_characters_before
        yield call
    if rest := text[num_given:]:
        yield rest


class OutputParser(Protocol):
    """Takes one answer's text. However it is cut into pieces, the same comes out."""

    def add(self, text: str, *, is_last: bool, is_cut: bool = False) -> ParsedText:
        """Take the next text; with the last, what was held back is given. It ``is_cut`` where more was to come."""
