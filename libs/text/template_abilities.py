"""What a chat template knows of tools, found by rendering a small conversation in which one is called.

What a template's source mentions says little: some refuse conversations that they seem to know, and they differ in
the shape in which they want calls. Owns the trial; it must not know how a template is rendered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from libs.errors import TemplateRefused
from libs.text.chat_message import ChatMessage, MessageShape, ToolCall

Render: TypeAlias = Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]]], str]

_NAME: Final = "octavo_trial"
_ARGUMENTS: Final = '{"octavo_key": "octavo_value"}'
_RESULT: Final = "octavo_result"
# Mistral's templates take ids of this form only.
_SHORT_ID: Final = "abcdefghi"
_LONG_ID: Final = "call_0123456789abcdef"
_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Try.",
        "parameters": {"type": "object", "properties": {"octavo_key": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """What a template knows."""

    # It tells a model of tools, and writes calls and their results.
    knows_tools: bool = False
    # It writes several calls of one message.
    knows_parallel_calls: bool = False
    # Ids of calls must be nine letters and digits.
    needs_short_ids: bool = False
    shape: MessageShape = field(default_factory=MessageShape)


def find_abilities(render: Render, *, has_tools: bool) -> TemplateAbilities:
    """Try a template; ``has_tools`` says whether it mentions tools at all."""
    if not has_tools:
        return TemplateAbilities()
    for flags in itertools.product((False, True), repeat=2):
        shape = MessageShape(*flags)
        if _can_write(render, shape, _SHORT_ID, num_calls=1):
            return TemplateAbilities(
                knows_tools=True,
                knows_parallel_calls=_can_write(render, shape, _SHORT_ID, num_calls=2),
                needs_short_ids=not _can_write(render, shape, _LONG_ID, num_calls=1),
                shape=shape,
            )
    return TemplateAbilities()


def _can_write(render: Render, shape: MessageShape, call_id: str, *, num_calls: int) -> bool:
    ids = [call_id[:-1] + str(index) for index in range(num_calls)]
    messages = [
        ChatMessage("user", "Try."),
        ChatMessage("assistant", "", tool_calls=tuple(ToolCall(one, _NAME, _ARGUMENTS) for one in ids)),
        *(ChatMessage("tool", _RESULT, name=_NAME, tool_call_id=one) for one in ids),
        # Some templates tell of tools in the last message of the user only.
        ChatMessage("assistant", "Done."),
        ChatMessage("user", "Again."),
    ]
    try:
        text = render([message.as_template_value(shape) for message in messages], [_TOOL])
    except TemplateRefused:
        return False
    # Once as a tool and once for each call; arguments as JSON, and not as JSON within JSON.
    return text.count(_NAME) > num_calls and text.count('"octavo_value"') == num_calls and _RESULT in text
