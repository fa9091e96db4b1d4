"""How a model hears of tools, calls and results: through its template where that knows them, else in words.

Owns the words. It must not know how they are rendered.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from libs.text import ChatMessage
from services.gateway.model_formats.format import ToolFormat
from services.gateway.model_formats.hermes import HermesFormat
from services.gateway.model_formats.model_format import ModelFormat
from services.gateway.prompts import ChatPrompt

# As Qwen's template words it.
_INTRODUCTION: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "{instruction}"
)
_SHORT_ID: Final = re.compile(r"[a-zA-Z0-9]{9}")


def phrased(prompt: ChatPrompt, model_format: ModelFormat) -> ChatPrompt:
    """Return a conversation as the model's template takes it."""
    if model_format.template_knows_tools:
        return _with_short_ids(prompt) if model_format.needs_short_ids else prompt
    if not prompt.tools and not any(message.tool_calls or message.role == "tool" for message in prompt.messages):
        return prompt
    tool_format = model_format.tools or HermesFormat()
    messages = tuple(_in_words(message, tool_format) for message in prompt.messages)
    if prompt.tools:
        messages = _introduced(messages, prompt.tools, tool_format)
    return dataclasses.replace(prompt, messages=messages, tools=())


def short_call_id(call_id: str) -> str:
    """Return an id of nine letters and digits, the same for the same id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]


def _with_short_ids(prompt: ChatPrompt) -> ChatPrompt:
    return dataclasses.replace(prompt, messages=tuple(map(_with_short_id, prompt.messages)))


def _with_short_id(message: ChatMessage) -> ChatMessage:
    calls = tuple(dataclasses.replace(call, call_id=short_call_id(call.call_id)) for call in message.tool_calls)
    answered = None if message.tool_call_id is None else short_call_id(message.tool_call_id)
    return dataclasses.replace(message, tool_calls=calls, tool_call_id=answered)


def _in_words(message: ChatMessage, tool_format: ToolFormat) -> ChatMessage:
    if message.role == "tool":
        # Templates that do not know tools know a tool's result as what the user says next.
        return ChatMessage("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [tool_format.call_text(call.name, call.arguments) for call in message.tool_calls]
    content = "\n".join([*([message.content] if message.content else []), *calls])
    return dataclasses.replace(message, content=content, tool_calls=())


def _introduced(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat
) -> tuple[ChatMessage, ...]:
    """Return the conversation with the tools at the end of its system message; one is added where there is none."""
    listed = "\n".join(orjson.dumps(tool).decode() for tool in tools)
    text = _INTRODUCTION.format(tools=listed, instruction=tool_format.instruction)
    first, rest = messages[0], messages[1:]
    if first.role == "system":
        return (dataclasses.replace(first, content=f"{first.content}\n\n{text}"), *rest)
    return (ChatMessage("system", text), *messages)
