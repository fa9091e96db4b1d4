"""Reasoning, which models write before an answer between markers of their own.

Owns where it begins and ends: a template may open it in the prompt already, or close it there. It must not know
what comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.gateway.model_formats.parsed import ParsedText
from services.gateway.model_formats.text_reader import Reading, TextReader


class ReasoningState(StrEnum):
    """Where an answer is."""

    # It may begin with reasoning.
    POSSIBLE = "possible"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers of one family of models."""

    name: str
    begin: str
    end: str

    @property
    def markers(self) -> tuple[str, str]:
        """Both markers."""
        return self.begin, self.end

    def state_after(self, prompt_end: str, continued_text: str | None) -> ReasoningState:
        """Return where an answer begins, after the last of a prompt's text.

        ``continued_text`` is the message that the answer goes on with, if it does.
        """
        if continued_text is not None:
            is_open = continued_text.rfind(self.begin) > continued_text.rfind(self.end)
            return ReasoningState.OPEN if is_open else ReasoningState.OVER
        ending = prompt_end.rstrip()
        if ending.endswith(self.begin):
            return ReasoningState.OPEN
        return ReasoningState.OVER if ending.endswith(self.end) else ReasoningState.POSSIBLE


THINK_TAGS: Final = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK: Final = ReasoningFormat("mistral", "[THINK]", "[/THINK]")


class ReasoningParser:
    """An ``OutputParser`` whose content is all that is not reasoning. White space around reasoning is dropped."""

    def __init__(self, reasoning: ReasoningFormat, state: ReasoningState) -> None:
        self._format = reasoning
        self.state = state
        self._reader = TextReader(self._read)

    def add(self, text: str, *, is_last: bool, is_cut: bool = False) -> ParsedText:
        """Take the next text; with the last, what was held back is given."""
        return self._reader.add(text, is_last=is_last, is_cut=is_cut)

    def _read(self, reader: TextReader) -> Reading[None]:
        if self.state is not ReasoningState.OVER:
            # A model may open what its template has opened already.
            has_marker = yield from reader.attempt(_opening(reader, self._format.begin))
            if has_marker or self.state is ReasoningState.OPEN:
                self.state = ReasoningState.OPEN
                yield from reader.skip_space()
                yield from self._read_reasoning(reader)
            self.state = ReasoningState.OVER
        yield from reader.rest(reader.give_content)

    def _read_reasoning(self, reader: TextReader) -> Reading[None]:
        if (yield from reader.text_until((self._format.end,), reader.give_reasoning)) is not None:
            self.state = ReasoningState.OVER
            yield from reader.skip_space()


def _opening(reader: TextReader, marker: str) -> Reading[None]:
    yield from reader.skip_space()
    yield from reader.expect(marker)
