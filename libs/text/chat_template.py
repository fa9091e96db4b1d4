"""Chat messages to the text, or the token ids, that the model was trained to answer.

Owns rendering, its bounds, and the guarantee that nothing in a message becomes a control token. It must not know
HTTP or what a request looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2

from libs.errors import InvalidRequest, ModelLoadFailed, TemplateRefused
from libs.text.control_text import BREAK
from libs.text.template_environment import RangeBudget, template_environment
from libs.text.tokenizer import Tokenizer
from libs.text.tokenizer_definition import NamedTokens

# What a template may add to twice the text of the messages.
MAX_ADDED_CHARACTERS: Final = 1_000_000
_MAX_REASON_CHARACTERS: Final = 500
# Stands for a message that is continued while the template is rendered; its last occurrence is that message.
_OPEN_MESSAGE_MARK: Final = "OctavoContinuesHere"


def _do_nothing() -> None:
    """Stand in where nobody wants to be called."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    name: str | None = None

    def as_template_value(self) -> dict[str, str]:
        """Return the mapping that templates expect; a name that is not given is absent, not empty."""
        value = {"role": self.role, "content": self.content}
        return value if self.name is None else value | {"name": self.name}


class ChatTemplate:
    """One model's chat template, compiled."""

    def __init__(
        self, source: str, named_tokens: NamedTokens, *, now: Callable[[], datetime] = datetime.now
    ) -> None:
        try:
            self._template = template_environment(now).from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadFailed(f"The model's chat template cannot be compiled: {error}.") from error
        self._named_tokens = named_tokens

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """Return the conversation as text, ending where the assistant's answer begins if asked for."""
        values = [message.as_template_value() for message in messages]
        return self._render(values, add_generation_prompt=add_generation_prompt)

    def render_token_ids(
        self,
        messages: Sequence[ChatMessage],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        on_rendered: Callable[[], None] = _do_nothing,
    ) -> list[int]:
        """Return the conversation as token ids; the text of a control token in a message stays text.

        ``on_rendered`` is called between rendering and tokenizing.

        With ``continue_final_message`` they end exactly with the last message's text, whatever the template would
        trim of it or put after it.
        """
        values: Any = [message.as_template_value() for message in messages]  # Any: JSON-like, as jinja takes it.
        has_risk = tokenizer.control_text.has_risk(values)
        if has_risk:
            values = tokenizer.control_text.protect(values)
        if continue_final_message:
            rendered = self._render_open(values)
        else:
            rendered = self._render(values, add_generation_prompt=add_generation_prompt)
        on_rendered()
        if has_risk:
            return tokenizer.encode_protected(rendered)
        return tokenizer.encode(rendered, allow_special=True)

    def _render_open(self, messages: Sequence[dict[str, str]]) -> str:
        """Render up to the last message's text and put that text after it as it is."""
        last = messages[-1]
        marked = [*messages[:-1], last | {"content": _OPEN_MESSAGE_MARK}]
        before, mark, _ = self._render(marked, add_generation_prompt=False).rpartition(_OPEN_MESSAGE_MARK)
        if not mark:
            raise _refusal("it does not write the last message as it is, so that message cannot be continued")
        return before + last["content"]

    def _render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        num_characters = sum(len(text) for message in messages for text in message.values())
        pieces = self._template.generate(
            self._named_tokens.texts,
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=None,
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
        on_rendered: Callable[[], None] = _do_nothing,
    ) -> NoReturn:
        """Refuse."""
        raise _no_template()


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
