"""Reads the calls of tools out of an answer's text as it comes.

Owns Hermes' form. However the text is cut into pieces, the same content, names and arguments come out. It must not
know tokens or the shapes in which calls are sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

import orjson

from services.gateway.tools import CALL_BEGIN, CALL_END

_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
# A call's head is some dozen characters beside its name; what is longer is none.
_MAX_HEAD_CHARACTERS: Final = 1024


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a call: with its first the function's name, then pieces of its arguments."""

    call_index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What became certain: text for the reader, and parts of calls."""

    content: str
    calls: tuple[CallDelta, ...]


class ToolCallParser(Protocol):
    """Takes one answer's text."""

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""

    def add(self, text: str, *, is_last: bool) -> ParsedText:
        """Take the next text; with the last, what was held back is given."""


class HermesCallParser:
    """A ``ToolCallParser`` of ``<tool_call>`` around JSON. White space next to a call is not content."""

    def __init__(self) -> None:
        self._pending = ""  # not yet certain
        self._read = self._read_text
        self._num_calls = 0
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    def add(self, text: str, *, is_last: bool) -> ParsedText:
        """Take the next text; with the last, what was held back is given."""
        self._pending += text
        while self._read():
            pass
        if is_last:
            self._flush()
        parsed = ParsedText("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return parsed

    def _read_text(self) -> bool:
        before, tag, after = self._pending.partition(CALL_BEGIN)
        if tag:
            self._content.append(before.rstrip())
            self._pending, self._read = after, self._read_head
            return True
        # A tag may be on its way, and white space before it would not be content.
        certain = self._pending[: len(self._pending) - _num_uncertain(self._pending)].rstrip()
        self._content.append(certain)
        self._pending = self._pending[len(certain) :]
        return False

    def _read_head(self) -> bool:
        match = _HEAD.match(self._pending, 0, _MAX_HEAD_CHARACTERS)
        if match is not None:
            self._emit(orjson.loads(match.group(1)), "")
            self._num_calls += 1
            self._pending, self._read = self._pending[match.end() :], self._read_arguments
            self._depth, self._is_in_string, self._is_escaped = 0, False, False
            return True
        if len(self._pending) > _MAX_HEAD_CHARACTERS:
            self._give_up_call()
            return True
        return False

    def _read_arguments(self) -> bool:
        for index, character in enumerate(self._pending):
            if self._is_end(character):
                self._emit(None, self._pending[: index + 1])
                self._pending, self._read = self._pending[index + 1 :], self._read_end
                return True
        self._emit(None, self._pending)
        self._pending = ""
        return False

    def _read_end(self) -> bool:
        _, tag, after = self._pending.partition(CALL_END)
        if tag:
            self._pending, self._read = after.lstrip(), self._read_after_call
        return bool(tag)

    def _read_after_call(self) -> bool:
        self._pending = self._pending.lstrip()
        if self._pending:
            self._read = self._read_text
        return bool(self._pending)

    def _is_end(self, character: str) -> bool:
        """Follow the nesting of JSON, and tell whether the arguments end with this character."""
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = False
            return False
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return self._depth == 0 and character == "}"

    def _emit(self, name: str | None, arguments: str) -> None:
        if name is not None:
            self._calls.append(CallDelta(self._num_calls, name, arguments))
        elif arguments:
            self._calls.append(CallDelta(self._num_calls - 1, None, arguments))

    def _give_up_call(self) -> None:
        """Show what looked like a call and is none as the text that it is."""
        self._content.append(CALL_BEGIN)
        self._read = self._read_text

    def _flush(self) -> None:
        while self._read == self._read_head:
            self._give_up_call()
            while self._read():
                pass
        if self._read == self._read_text:
            # White space after a call is not content; without any call all of the text is.
            self._content.append(self._pending.rstrip() if self._num_calls else self._pending)
        self._pending = ""


def _num_uncertain(text: str) -> int:
    """Return how many characters at the end may be the beginning of a call."""
    for length in range(min(len(text), len(CALL_BEGIN) - 1), 0, -1):
        if CALL_BEGIN.startswith(text[-length:]):
            return length
    return 0
