"""The forms of one model: how it calls tools and how it reasons. Owns the choice and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.gateway.model_formats.deepseek import CALLS_BEGIN, DeepSeekV3Format, DeepSeekV31Format
from services.gateway.model_formats.format import ToolFormat, Vocabulary
from services.gateway.model_formats.hermes import HermesFormat
from services.gateway.model_formats.llama3 import Llama3Format
from services.gateway.model_formats.mistral import ARGUMENTS, MistralListFormat, MistralNamedFormat
from services.gateway.model_formats.parsed import OutputParser, ParsedText
from services.gateway.model_formats.pythonic import PythonicFormat
from services.gateway.model_formats.reasoning import (
    MISTRAL_THINK,
    THINK_TAGS,
    ReasoningFormat,
    ReasoningParser,
    ReasoningState,
)
from services.gateway.model_formats.text_reader import TextReader

AUTO: Final = "auto"
NONE: Final = "none"

_ALL_TOOL_FORMATS: Final[Sequence[ToolFormat]] = (
    HermesFormat(),
    Llama3Format(),
    PythonicFormat(),
    MistralListFormat(),
    MistralNamedFormat(),
    DeepSeekV3Format(),
    DeepSeekV31Format(),
)
TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {one.name: one for one in _ALL_TOOL_FORMATS}
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {one.name: one for one in (THINK_TAGS, MISTRAL_THINK)}


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """How one model writes what is not plain text."""

    tools: ToolFormat = field(default_factory=HermesFormat)
    reasoning: ReasoningFormat | None = None
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary(None))

    def kept_token_ids(self, *, with_tools: bool) -> frozenset[int]:
        """Return the control tokens whose text is needed to read an answer."""
        marks = [*(self.tools.marks if with_tools else ()), *(self.reasoning.marks if self.reasoning else ())]
        token_ids = (self.vocabulary.control_token_id(mark) for mark in marks)
        return frozenset(token_id for token_id in token_ids if token_id is not None)

    def new_parser(self, state: ReasoningState, tool_names: Collection[str]) -> AnswerParser | None:
        """Return what reads an answer, None where there is nothing to read: text is text then."""
        reasoning = None if self.reasoning is None else ReasoningParser(self.reasoning, state)
        if not tool_names:
            return None if reasoning is None else AnswerParser(reasoning, None)
        return AnswerParser(reasoning, TextReader(lambda reader: self.tools.read(reader, tool_names)))


class AnswerParser:
    """An ``OutputParser``: reasoning first, then text with calls in it."""

    def __init__(self, reasoning: ReasoningParser | None, calls: OutputParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def reasoning_state(self) -> ReasoningState:
        """Where the answer is."""
        return ReasoningState.OVER if self._reasoning is None else self._reasoning.state

    def add(self, text: str, *, is_last: bool) -> ParsedText:
        """Take the next text; with the last, what was held back is given."""
        before = ParsedText(text) if self._reasoning is None else self._reasoning.add(text, is_last=is_last)
        if self._calls is None:
            return before
        after = self._calls.add(before.content, is_last=is_last)
        return ParsedText(after.content, before.reasoning, after.calls)


def detect_tool_format(template: str | None) -> ToolFormat | None:
    """Return the form of calls that a chat template writes, None where it writes none that is known."""
    source = template or ""
    if CALLS_BEGIN in source:
        return TOOL_FORMATS["deepseek_v3" if "```json" in source else "deepseek_v31"]
    if "[TOOL_CALLS]" in source:
        return TOOL_FORMATS["mistral_named" if ARGUMENTS in source else "mistral"]
    # Around XML instead of JSON it is another form.
    if "<tool_call>" in source and "<function=" not in source:
        return TOOL_FORMATS["hermes"]
    if "<|python_start|>" in source or "[func_name1(" in source:
        return TOOL_FORMATS["pythonic"]
    if "<|python_tag|>" in source or ("ipython" in source and '"parameters": ' in source):
        return TOOL_FORMATS["llama3"]
    return None


def detect_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """Return the marks of reasoning that a chat template knows."""
    source = template or ""
    known = (one for one in REASONING_FORMATS.values() if any(mark in source for mark in one.marks))
    return next(known, None)
