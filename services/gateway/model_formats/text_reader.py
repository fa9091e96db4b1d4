"""Reading a text that comes in pieces as if it were all there.

A reader of a form is a generator: where it needs text that has not come yet, it yields. So it reads straight down,
and because it decides by the text alone, the cuts between pieces change nothing. Owns the text that is not yet
certain and what has become of the rest. It must not know any form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import Final, TypeAlias, TypeVar

import orjson

from services.gateway.model_formats.parsed import CallDelta, ParsedText

Result = TypeVar("Result")
# Yields where more text is needed.
Reading: TypeAlias = Generator[None, None, Result]

# In JSON outside of strings: what opens, what closes, what begins a string; and what cannot stand there at all.
_NEXT_STRUCTURE: Final = re.compile(r"[\[\]{}\"]|[^\[\]{}\",:\s0-9a-z.+\-E]")
_NEXT_IN_STRING: Final = re.compile(r"[\"\\]")
_MAX_STRING_CHARACTERS: Final = 256
_MAX_PARENTHESIZED_CHARACTERS: Final = 64 * 1024


class NotACall(Exception):
    """What was read is not what it began as."""


class TextReader:
    """The text of one answer, and what was read out of it."""

    def __init__(self, read: Callable[[TextReader], Reading[None]]) -> None:
        """Begin; ``read`` takes all of the text."""
        self._text = ""  # not yet given
        self._position = 0  # how far it was looked at
        self._is_complete = False
        self._is_cut = False  # it is complete and was not meant to be
        self._is_at_end = False  # what was tried behind a marker needed more text than there is
        self._is_trying = False  # what was looked at may have to be looked at again
        self._space_before_marker = ""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self._num_calls = 0
        self._reading = read(self)

    def add(self, text: str, *, is_last: bool, is_cut: bool = False) -> ParsedText:
        """Take the next text; with the last, what was held back is given, but the head of a call that was cut."""
        self._text += text
        self._is_complete, self._is_cut = is_last, is_cut
        next(self._reading, None)
        parsed = ParsedText("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        return parsed

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._num_calls

    # What becomes of text.

    def give_content(self, text: str) -> None:
        """Show text to the reader of the answer."""
        self._content.append(text)

    def give_reasoning(self, text: str) -> None:
        """Show text as reasoning."""
        self._reasoning.append(text)

    def give_back(self, marker: str) -> None:
        """Show a marker that ``text_until`` has passed and that began nothing as the text that it is.

        Where a call had begun and the answer was cut in its head, neither is of use to anybody.
        """
        if self._is_cut and self._is_at_end:
            self._position = len(self._text)
        else:
            self._content.append(self._space_before_marker + marker)

    def begin_call(self, name: str) -> None:
        """Begin a call: what was looked at until here is its head and will not be shown."""
        self._calls.append(CallDelta(self._num_calls, name, "", self._num_content_characters))
        self._num_calls += 1
        self._is_trying = False
        self._drop_looked_at()

    def give_arguments(self, text: str) -> None:
        """Go on with the arguments of the call that began last."""
        index = self._num_calls - 1
        if text and self._calls and self._calls[-1].name is None:
            # What came together is told together.
            text = self._calls.pop().arguments + text
        if text:
            self._calls.append(CallDelta(index, None, text, self._num_content_characters))

    @property
    def _num_content_characters(self) -> int:
        return sum(map(len, self._content))

    # Looking at text.

    def attempt(self, reading: Reading[None]) -> Reading[bool]:
        """Read a call; where there is none, be where it was tried and return False.

        A call that has begun stays one, however it goes on.
        """
        start, num_calls = self._position, self._num_calls
        self._is_trying = True
        try:
            yield from reading
        except NotACall:
            if self._num_calls == num_calls:
                self._position = start
                return False
        finally:
            self._is_trying = False
        self._drop_looked_at()
        return True

    def peek(self) -> Reading[str]:
        """Return the next character; nothing at the end."""
        while self._position >= len(self._text) and not self._is_complete:
            yield
        self._is_at_end |= self._position >= len(self._text)
        return self._text[self._position : self._position + 1]

    def next_is(self, literal: str) -> Reading[bool]:
        """Tell whether the text goes on with ``literal``."""
        while True:
            have = self._text[self._position : self._position + len(literal)]
            if have == literal:
                return True
            if self._is_complete or not literal.startswith(have):
                self._is_at_end |= literal.startswith(have)
                return False
            yield

    def skip(self, literal: str) -> Reading[bool]:
        """Pass ``literal`` if the text goes on with it, and tell whether it did."""
        is_next = yield from self.next_is(literal)
        if is_next:
            self._position += len(literal)
        return is_next

    def expect(self, literal: str) -> Reading[None]:
        """Pass ``literal``; raises NotACall where the text goes on otherwise."""
        is_next = yield from self.skip(literal)
        if not is_next:
            raise NotACall

    def skip_any(self, characters: str) -> Reading[None]:
        """Pass all that is of these characters."""
        while (character := (yield from self.peek())) and character in characters:
            self._position += 1

    def skip_space(self) -> Reading[None]:
        """Pass white space."""
        while (character := (yield from self.peek())) and character.isspace():
            self._position += 1

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Return the longest text of characters that ``pattern`` takes one by one; raises NotACall for none."""
        start = self._position
        while (character := (yield from self.peek())) and pattern.fullmatch(character):
            self._position += 1
            if self._position - start > _MAX_STRING_CHARACTERS:
                raise NotACall
        if self._position == start:
            raise NotACall
        return self._text[start : self._position]

    def json_string(self) -> Reading[str]:
        """Return a short string of JSON; raises NotACall for anything else."""
        start = self._position
        yield from self.expect('"')
        while (character := (yield from self.peek())) != '"':
            self._position += 2 if character == "\\" else 1
            if not character or self._position - start > _MAX_STRING_CHARACTERS:
                raise NotACall
        self._position += 1
        try:
            return str(orjson.loads(self._text[start : self._position]))
        except orjson.JSONDecodeError as error:
            raise NotACall from error

    def parenthesized(self) -> Reading[str]:
        """Return a text from ``(`` to its ``)``, strings of Python included; raises NotACall for anything else."""
        start = self._position
        yield from self.expect("(")
        depth, quote = 1, ""
        while depth:
            character = yield from self.peek()
            if not character or self._position - start > _MAX_PARENTHESIZED_CHARACTERS:
                raise NotACall
            self._position += 1
            if quote:
                self._position += character == "\\"
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            else:
                depth += (character in "([{") - (character in ")]}")
        return self._text[start : self._position]

    # Giving text.

    def text_until(self, markers: Collection[str], give: Callable[[str], None]) -> Reading[str | None]:
        """Give the text before the first of ``markers``, pass it and return it; None when all text is given.

        White space next to a marker belongs to it and is not given.
        """
        while True:
            found = [
                (index, marker) for marker in markers if (index := self._text.find(marker, self._position)) >= 0
            ]
            if found:
                index, marker = min(found)
                before = self._text[self._position : index]
                give(before.rstrip())
                self._space_before_marker = before[len(before.rstrip()) :]
                self._position = index + len(marker)
                self._is_at_end = False
                self._drop_looked_at()
                return marker
            if self._is_complete:
                rest = self._text[self._position :]
                give(_without_marker(rest, markers) if self._num_calls else rest)
                self._text, self._position = "", 0
                return None
            # A marker may be on its way, and white space before it is not given.
            uncertain = max(_num_uncertain(self._text, marker) for marker in markers)
            end = max(len(self._text[: len(self._text) - uncertain].rstrip()), self._position)
            give(self._text[self._position : end])
            self._position = end
            self._drop_looked_at()
            yield

    def rest(self, give: Callable[[str], None]) -> Reading[None]:
        """Give all that comes."""
        while True:
            give(self._text[self._position :])
            self._text, self._position = "", 0
            if self._is_complete:
                return
            yield

    def json_object(self, give: Callable[[str], None]) -> Reading[bool]:
        """Give an object of JSON as it comes; tell whether it came to its end.

        Follows strings and nesting alone. A character that no JSON has outside of strings breaks it off. Raises
        NotACall where no object begins.
        """
        start = self._position
        if (yield from self.peek()) != "{":
            raise NotACall
        depth, is_in_string = 0, False
        while True:
            match = (_NEXT_IN_STRING if is_in_string else _NEXT_STRUCTURE).search(self._text, self._position)
            if match is None or (match.group() == "\\" and match.end() == len(self._text)):
                self._position = len(self._text) if match is None else match.start()
                give(self._text[start : self._position])
                if not self._is_trying:
                    self._drop_looked_at()
                start = self._position
                if self._is_complete:
                    give(self._text[start:])
                    self._position = len(self._text)
                    return False
                yield
                continue
            character, self._position = match.group(), match.end()
            if is_in_string:
                self._position += character == "\\"  # What it escapes is no end.
                is_in_string = character != '"'
            elif character == '"':
                is_in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            else:
                self._position -= 1
                give(self._text[start : self._position])
                return False
            if depth == 0:
                give(self._text[start : self._position])
                return True

    def close_call(self, end: str, begin: str) -> Reading[None]:
        """Pass the end of a call and white space after it.

        What a model wrote between the call and its end is no part of either; without an end it is given as text,
        unless it is as much of the end as came before the answer was cut.
        """
        while True:
            end_at, begin_at = (self._text.find(marker, self._position) for marker in (end, begin))
            if end_at >= 0 and (begin_at < 0 or end_at < begin_at):
                self._position = end_at + len(end)
                break
            if begin_at >= 0 or self._is_complete:
                stop = begin_at if begin_at >= 0 else len(self._text)
                rest = self._text[self._position : stop].strip()
                self.give_content(rest if begin_at >= 0 else _without_marker(rest, (end,)))
                self._position = stop
                break
            yield
        yield from self.skip_space()
        self._drop_looked_at()

    def _drop_looked_at(self) -> None:
        self._text, self._position = self._text[self._position :], 0


def _num_uncertain(text: str, marker: str) -> int:
    """Return how many characters at the end may be the beginning of ``marker``."""
    tail = text[1 - len(marker) :]
    start = tail.find(marker[0])
    while start >= 0 and not marker.startswith(tail[start:]):
        start = tail.find(marker[0], start + 1)
    return len(tail) - start if start >= 0 else 0


def _without_marker(rest: str, markers: Collection[str]) -> str:
    """Return the end of a text after a call, without white space and the beginning of a marker behind it."""
    num_uncertain = max(_num_uncertain(rest, marker) for marker in markers)
    return rest[: len(rest) - num_uncertain].rstrip()
