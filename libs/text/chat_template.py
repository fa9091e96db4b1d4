"""Chat messages to the text, or the token ids, that the model was trained to answer.

Owns rendering, its bounds, and the guarantee that nothing in a message becomes a control token. It must not know
HTTP or what a request looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes

from libs.errors import InvalidRequest, ModelLoadFailed, TemplateRefused
from libs.text.chat_message import ChatMessage, MessageShape
from libs.text.control_text import BREAK
from libs.text.template_abilities import TemplateAbilities, find_abilities
from libs.text.template_environment import RangeBudget, template_environment
from libs.text.tokenizer import Tokenizer
from libs.text.tokenizer_definition import NamedTokens

# What a template may add to twice the text of the messages.
MAX_ADDED_CHARACTERS: Final = 1_000_000
_MAX_REASON_CHARACTERS: Final = 500
# Stands for a message that is continued while the template is rendered; its last occurrence is that message.
_OPEN_MESSAGE_MARK: Final = "OctavoContinuesHere"
_GIVEN_NAMES: Final = frozenset(
    {"messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"}
)
_NO_VARIABLES: Final[Mapping[str, Any]] = {}


def do_nothing() -> None:
    """Stand in where nobody wants to be called."""


class ChatTemplate:
    """One model's chat template, compiled."""

    def __init__(
        self, source: str, named_tokens: NamedTokens, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        environment = template_environment(now)
        try:
            self._template = environment.from_string(source)
            names = _settable_variables(environment.parse(source))
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            # The last two: loops or brackets within one another, more than Python takes.
            raise ModelLoadFailed(f"The model's chat template cannot be compiled: {error}.") from error
        self._named_tokens = named_tokens
        # What a caller may set; the rest are given by this class or by the environment.
        self.variables = names - _GIVEN_NAMES - set(named_tokens.texts) - set(environment.globals)

    @cached_property
    def abilities(self) -> TemplateAbilities:
        """What the template knows of tools, found by trying."""
        return find_abilities(
            lambda values, tools: self._render(values, add_generation_prompt=False, tools=tools),
            has_tools="tools" in self.source,
        )

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """Return the conversation as text, ending where the assistant's answer begins if asked for."""
        return self._render(self._values(messages), add_generation_prompt=add_generation_prompt)

    def render_token_ids(
        self,
        messages: Sequence[ChatMessage],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
        on_rendered: Callable[[], None] = do_nothing,
    ) -> list[int]:
        """Return the conversation as token ids; the text of a control token in what a client gives stays text.

        ``tools`` are OpenAI's, ``variables`` some of those that the template reads; ``on_rendered`` is called
        between rendering and tokenizing.

        With ``continue_final_message`` they end exactly with the last message's text, whatever the template would
        trim of it or put after it.
        """
        # Any: JSON-like, as jinja takes it.
        given: Any = {"messages": self._values(messages), "tools": list(tools), "variables": dict(variables)}
        has_risk = tokenizer.control_text.has_risk(given)
        if has_risk:
            given = tokenizer.control_text.protect(given)
        values, more = given["messages"], {"tools": given["tools"], "variables": given["variables"]}
        if continue_final_message:
            rendered = self._render_open(values, **more)
        else:
            rendered = self._render(values, add_generation_prompt=add_generation_prompt, **more)
        on_rendered()
        if has_risk:
            return tokenizer.encode_protected(rendered)
        return tokenizer.encode(rendered, allow_special=True)

    def _values(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        has_calls = any(message.tool_calls for message in messages)
        shape = self.abilities.shape if has_calls else MessageShape()
        return [message.as_template_value(shape) for message in messages]

    def _render_open(self, messages: Sequence[dict[str, Any]], **more: Any) -> str:
        """Render up to the last message's text and put that text after it as it is."""
        last = messages[-1]
        marked = [*messages[:-1], last | {"content": _OPEN_MESSAGE_MARK}]
        before, mark, _ = self._render(marked, add_generation_prompt=False, **more).rpartition(_OPEN_MESSAGE_MARK)
        if not mark:
            raise _refusal("it does not write the last message as it is, so that message cannot be continued")
        return before + str(last["content"])

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> str:
        num_characters = _num_characters([messages, tools, variables])
        pieces = self._template.generate(
            self._named_tokens.texts,
            **variables,
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            documents=None,
            range=RangeBudget(),
        )
        try:
            return _joined(pieces, max_characters=2 * num_characters + MAX_ADDED_CHARACTERS)
        except TemplateRefused:
            raise
        except Exception as error:  # A template can fail in any way that an expression can; all are its refusal.
            raise _refusal(str(error) or type(error).__name__) from error


class MissingChatTemplate:
    """Stands in where a model has no chat template: a base model, which only continues text."""

    source = None
    variables: frozenset[str] = frozenset()
    abilities = TemplateAbilities()

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> NoReturn:
        """Refuse."""
        raise _no_template()

    def render_token_ids(
        self,
        messages: Sequence[ChatMessage],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
        on_rendered: Callable[[], None] = do_nothing,
    ) -> NoReturn:
        """Refuse."""
        raise _no_template()


def _settable_variables(template: jinja2.nodes.Template) -> frozenset[str]:
    """Return the variables that a template reads without having set them.

    What it sets in some branch only counts where it looks whether it was given.
    """
    set_names = {node.name for node in template.find_all(jinja2.nodes.Name) if node.ctx == "store"}
    looked_at = {
        test.node.name
        for test in template.find_all(jinja2.nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, jinja2.nodes.Name)
    }
    return frozenset(jinja2.meta.find_undeclared_variables(template) - (set_names - looked_at))


def _num_characters(value: Any) -> int:
    """Return how much text there is in a value of mappings and lists, their keys included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_characters(key) + _num_characters(item) for key, item in value.items())
    return sum(map(_num_characters, value)) if isinstance(value, list | tuple) else 0


def _joined(pieces: Iterable[str], *, max_characters: int) -> str:
    kept: list[str] = []
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > max_characters:
            raise _refusal(f"it writes more than {max_characters} characters for these messages")
        kept.append(piece)
    return "".join(kept)


def _refusal(reason: str) -> TemplateRefused:
    shown = reason.replace(BREAK, "")[:_MAX_REASON_CHARACTERS]
    return TemplateRefused(f"The model's chat template refused the messages: {shown}", param="messages")


def _no_template() -> InvalidRequest:
    return InvalidRequest(
        "This model has no chat template, so it cannot answer chat messages; send the prompt as plain text.",
        param="messages",
    )
