"""Messages of a conversation, and how templates expect them. Owns both; it must not know templates themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the assistant made; ``arguments`` is a JSON object as text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class MessageShape:
    """What templates differ in: they were written beside clients that differed."""

    # The arguments of calls are JSON as text, not a mapping.
    has_arguments_as_text: bool = False
    # The content of a message that only calls is empty, not none.
    has_empty_content: bool = False


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    # Of a tool's result: the call that it answers.
    tool_call_id: str | None = None
    # What the assistant thought before; templates leave most of it out.
    reasoning: str | None = None

    @property
    def num_characters(self) -> int:
        """How much text there is."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + calls + len(self.reasoning or "") + len(self.name or "")

    def as_template_value(self, shape: MessageShape) -> dict[str, Any]:
        """Return the mapping that templates expect; what is not given is absent, not empty."""
        value: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            if not self.content and not shape.has_empty_content:
                value["content"] = None
            value["tool_calls"] = [_call_value(call, shape) for call in self.tool_calls]
        given = (("name", self.name), ("tool_call_id", self.tool_call_id), ("reasoning_content", self.reasoning))
        return value | {key: text for key, text in given if text is not None}


def _call_value(call: ToolCall, shape: MessageShape) -> dict[str, Any]:
    arguments = call.arguments if shape.has_arguments_as_text else json.loads(call.arguments)
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
