"""The prompts that a request can hold, before they are token ids. Owns no behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from libs.text import ChatMessage


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, and how the model's template ends it.

    With ``continue_final_message`` the prompt ends with the last message's text, and the answer goes on with it.
    """

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # What the model is told that it may call, in OpenAI's shape.
    tools: tuple[Mapping[str, Any], ...] = ()
    # Of those that the template reads.
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_characters(self) -> int:
        """How much text there is to render and tokenize."""
        tools = sum(len(orjson.dumps(tool)) for tool in self.tools)
        return tools + sum(message.num_characters for message in self.messages)

    @property
    def certain_texts(self) -> Sequence[str]:
        """What is tokenized whatever the template does, which may drop what an assistant said before."""
        return [message.content.strip() for message in self.messages if message.role == "user"]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text that the caller has composed, control tokens included."""

    text: str
    add_special_tokens: bool = True

    @property
    def num_characters(self) -> int:
        """How much text there is to tokenize."""
        return len(self.text)

    @property
    def certain_texts(self) -> Sequence[str]:
        """What is tokenized."""
        return [self.text]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids."""

    token_ids: tuple[int, ...]

    @property
    def num_characters(self) -> int:
        """There is nothing to tokenize."""
        return 0

    @property
    def certain_texts(self) -> Sequence[str]:
        """There is nothing to tokenize."""
        return []


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt
