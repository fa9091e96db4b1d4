"""Stop strings in a stream of text.

Owns the search over the borders of tokens and what has to be held back for it. The caller feeds the text of one
token at a time, so it knows after which token a match was complete. It must not know tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """What a piece of text leads to: text that may be shown, and the stop string that ended the answer."""

    text_to_emit: str
    matched: str | None


class StopStringMatcher:
    """Passes text on until a stop string is complete, and never shows a part of one.

    The stop string whose end comes first wins; of those that end together the longest, so that nothing of it is
    shown. Only text that is still the beginning of a stop string is held back; with ``include_stop_str`` the stop
    string is part of the answer, so nothing has to be.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop_str: bool) -> None:
        assert all(stop_strings), f"an empty stop string among {stop_strings!r}"
        self._prefixes = [_PrefixMatcher(stop_string) for stop_string in stop_strings]
        self._includes_stop_str = include_stop_str
        self._held = ""
        self._is_matched = False

    def add(self, text: str) -> StopResult:
        """Take the next text of the answer. After a match there is no next text."""
        assert not self._is_matched, f"text after a stop string: {text!r}"
        for index, character in enumerate(text):
            completed = [prefix.stop_string for prefix in self._prefixes if prefix.advance(character)]
            if completed:
                return self._match(max(completed, key=len), text[: index + 1])
        return StopResult(self._release(text), matched=None)

    def pass_by(self, text: str) -> str:
        """Return text in which nothing is looked for, after what was held back: no stop string reaches over it."""
        for prefix in self._prefixes:
            prefix.num_matched = 0
        return self.flush() + text

    def flush(self) -> str:
        """Return what was held back: the answer ended, so it is no beginning of a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _match(self, stop_string: str, text: str) -> StopResult:
        answer = self._held + text
        self._held = ""
        self._is_matched = True
        return StopResult(answer if self._includes_stop_str else answer[: -len(stop_string)], matched=stop_string)

    def _release(self, text: str) -> str:
        """Return all but the longest end that is the beginning of a stop string."""
        known = self._held + text
        num_held = 0
        if not self._includes_stop_str:
            num_held = max((prefix.num_matched for prefix in self._prefixes), default=0)
        num_released = len(known) - num_held
        self._held = known[num_released:]
        return known[:num_released]


class _PrefixMatcher:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop_string: str) -> None:
        self.stop_string = stop_string
        self.num_matched = 0
        self._fallbacks = _fallbacks(stop_string)

    def advance(self, character: str) -> bool:
        """Take one character and say whether the stop string is complete."""
        num_matched = self.num_matched
        while num_matched and self.stop_string[num_matched] != character:
            num_matched = self._fallbacks[num_matched - 1]
        if self.stop_string[num_matched] == character:
            num_matched += 1
        self.num_matched = num_matched
        return num_matched == len(self.stop_string)


def _fallbacks(text: str) -> list[int]:
    """Return, for each beginning of ``text``, the length of its longest proper end that is also a beginning."""
    lengths = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = lengths[length - 1]
        if text[index] == text[length]:
            length += 1
        lengths[index] = length
    return lengths
