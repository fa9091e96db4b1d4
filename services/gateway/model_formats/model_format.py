"""The forms of one model: how it calls tools and how it reasons. Owns the choice and what follows from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.text import ModelText
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
_REASONING_SWITCHES: Final = ("enable_thinking", "thinking")

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
    """How one model writes what is not plain text, and what its template knows of it."""

    # None where the operator wants no tools.
    tools: ToolFormat | None = field(default_factory=HermesFormat)
    reasoning: ReasoningFormat | None = None
    vocabulary: Vocabulary = field(default_factory=lambda: Vocabulary(None))
    # The template tells the model of tools in the words that it was trained on.
    template_knows_tools: bool = False
    # Several calls of one message can be given back to the model.
    has_parallel_calls: bool = True
    needs_short_ids: bool = False
    # What requests may set in the template.
    variables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model_text: ModelText, tool_format: str = AUTO, reasoning_format: str = AUTO) -> ModelFormat:
        """Return a model's forms: as its template has them, or those that are named."""
        template = model_text.chat_template
        abilities = template.abilities
        detected = detect_tool_format(template.source)
        if tool_format == AUTO:
            tools: ToolFormat | None = detected or HermesFormat()
        else:
            tools = None if tool_format == NONE else TOOL_FORMATS[tool_format]
        if reasoning_format == AUTO:
            reasoning = detect_reasoning_format(template.source)
        else:
            reasoning = None if reasoning_format == NONE else REASONING_FORMATS[reasoning_format]
        # A template whose form of calls is not read here would tell the model of that form.
        knows_tools = abilities.knows_tools and (detected is not None or tool_format != AUTO)
        return cls(
            tools=tools,
            reasoning=reasoning,
            vocabulary=Vocabulary(model_text.tokenizer),
            template_knows_tools=knows_tools,
            has_parallel_calls=abilities.knows_parallel_calls if knows_tools else True,
            needs_short_ids=abilities.needs_short_ids,
            variables=template.variables,
        )

    @property
    def reasoning_switch(self) -> str | None:
        """The template's variable that turns reasoning on and off, if the model reasons and has one."""
        if self.reasoning is None:
            return None
        return next((name for name in _REASONING_SWITCHES if name in self.variables), None)

    @property
    def can_limit_reasoning(self) -> bool:
        """Whether reasoning can be held to a number of tokens: its end must be one token."""
        return self.reasoning is not None and self.vocabulary.token_id(self.reasoning.end) is not None

    def kept_token_ids(self, *, with_tools: bool) -> frozenset[int]:
        """Return the control tokens whose text is needed to read an answer."""
        markers = [
            *(self.tools.markers if with_tools and self.tools else ()),
            *(self.reasoning.markers if self.reasoning else ()),
        ]
        token_ids = (self.vocabulary.control_token_id(marker) for marker in markers)
        return frozenset(token_id for token_id in token_ids if token_id is not None)

    def new_parser(self, state: ReasoningState, tool_names: Collection[str]) -> AnswerParser | None:
        """Return what reads an answer, None where there is nothing to read: text is text then."""
        reasoning = None if self.reasoning is None else ReasoningParser(self.reasoning, state)
        tools = self.tools
        if not tool_names or tools is None:
            return None if reasoning is None else AnswerParser(reasoning, None)
        return AnswerParser(reasoning, TextReader(lambda reader: tools.read(reader, tool_names)))


class AnswerParser:
    """An ``OutputParser``: reasoning first, then text with calls in it."""

    def __init__(self, reasoning: ReasoningParser | None, calls: OutputParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def reasoning_state(self) -> ReasoningState:
        """Where the answer is."""
        return ReasoningState.OVER if self._reasoning is None else self._reasoning.state

    def add(self, text: str, *, is_last: bool, is_cut: bool = False) -> ParsedText:
        """Take the next text; with the last, what was held back is given."""
        before = ParsedText(text) if self._reasoning is None else self._reasoning.add(text, is_last=is_last)
        if self._calls is None:
            return before
        after = self._calls.add(before.content, is_last=is_last, is_cut=is_cut)
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
    """Return the markers of reasoning that a chat template knows."""
    source = template or ""
    known = (one for one in REASONING_FORMATS.values() if any(marker in source for marker in one.markers))
    return next(known, None)
