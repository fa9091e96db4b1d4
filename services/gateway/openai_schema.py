"""OpenAI's chat completion request: from a JSON object to a type that cannot be wrong.

Owns the meaning, the type and the bounds of its messages. It must not know HTTP, tokens of a prompt or engines.
What is documented here is what clients may send; everything else is a 400 that names the field.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from libs.errors import InvalidRequest, ModelNotFound, UnsupportedField
from libs.text import ChatMessage
from services.gateway.generation_fields import (
    CONTINUE_FINAL_MESSAGE,
    INCLUDE_REASONING,
    LOGPROBS,
    MAX_COMPLETION_TOKENS,
    MAX_TOKENS,
    PARALLEL_TOOL_CALLS,
    THINKING_TOKEN_BUDGET,
    TOP_LOGPROBS,
)
from services.gateway.generation_options import GenerationOptions, parse_generation_options
from services.gateway.model_formats.model_format import ModelFormat
from services.gateway.openai_fields import check_chat_fields, check_content_part_fields, check_message_fields
from services.gateway.openai_values import read_boolean
from services.gateway.output_constraints import check_beside_tools
from services.gateway.prompts import ChatPrompt
from services.gateway.reasoning_fields import (
    check_reasoning_limit,
    effort_variables,
    merged_variables,
    read_template_variables,
)
from services.gateway.request_fields import IntegerField
from services.gateway.tool_grammar import tool_constraint
from services.gateway.tools import ToolUse, check_results, make_tool_use, read_choice, read_tool_calls, read_tools

MAX_MESSAGES: Final = 2048
MAX_CONTENT_PARTS: Final = 2048
MAX_MODEL_NAME_CHARACTERS: Final = 64
MAX_SPEAKER_NAME_CHARACTERS: Final = 64

# By role, the one that templates know.
_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_UNSUPPORTED_ROLES: Final = frozenset({"function"})
_SAFE_NAME: Final = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the schema must know of the served model."""

    name: str
    vocab_size: int
    # Other names by which clients may ask for it.
    aliases: tuple[str, ...] = ()
    # How it calls tools and reasons.
    format: ModelFormat = field(default_factory=ModelFormat)
    # How it is sampled from where a request says nothing, by the names of fields. Any: numbers, checked.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Every name under which the model is served, its own first."""
        return (self.name, *self.aliases)

    def own_name(self, name: str) -> str:
        """Return the model's own name for any of its names, and every other name as it is."""
        return self.name if name in self.aliases else name


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidChatCompletion:
    """A chat completion request in which every value can be served."""

    model: str
    prompt: ChatPrompt
    options: GenerationOptions

    @property
    def prompts(self) -> tuple[ChatPrompt]:
        """The one prompt."""
        return (self.prompt,)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the audit should know of a request even if the rest of it is wrong."""

    model_name: str
    is_streaming: bool


def read_head(body: Mapping[str, Any]) -> RequestHead:
    """Return what can be told of a request that may be wrong."""
    model = body.get("model")
    return RequestHead(
        model_name=shown_name(model) if isinstance(model, str) else "", is_streaming=body.get("stream") is True
    )


def shown_name(name: str) -> str:
    """Return a client's name for a model as it may stand in logs, rows and messages: short and printable."""
    return _SAFE_NAME.sub("?", name[:MAX_MODEL_NAME_CHARACTERS])


def parse_chat_completion(body: Mapping[str, Any], model: ModelFacts) -> ValidChatCompletion:
    """Check every field and return the request.

    Raises:
        InvalidRequest: a value that cannot be served; names the field.
        UnsupportedField: a field that is known and not served.
        ModelNotFound: another model.
    """
    check_chat_fields(body)
    model_name = read_model_name(body, model)
    prompt = read_chat_prompt(body, model)
    options = dataclasses.replace(
        parse_generation_options(
            body,
            vocab_size=model.vocab_size,
            max_output_tokens=read_max_output_tokens(body, MAX_TOKENS),
            num_logprobs=_num_logprobs(body),
            defaults=model.sampling_defaults,
        ),
        reads_reasoning=True,
        shows_reasoning=INCLUDE_REASONING.read(body),
        max_reasoning_tokens=_max_reasoning_tokens(body, model),
    )
    tools = _tool_use(body)
    if tools is not None:
        check_beside_tools(body)
        options, prompt = with_tools(options, prompt, tools, model)
    return ValidChatCompletion(model=model_name, prompt=prompt, options=options)


def with_tools(
    options: GenerationOptions, prompt: ChatPrompt, tools: ToolUse, model: ModelFacts
) -> tuple[GenerationOptions, ChatPrompt]:
    """Return a request in which the model is told of tools and its answer is held to their calls, or to its form.

    Raises:
        UnsupportedField: this model cannot be held so.
    """
    constraint = tool_constraint(tools, model.format, options.constraint)
    told = tuple(tool.as_value() for tool in tools.tools)
    return (
        dataclasses.replace(options, constraint=constraint, tools=tools),
        dataclasses.replace(prompt, tools=told),
    )


def _tool_use(body: Mapping[str, Any]) -> ToolUse | None:
    tools = read_tools(body.get("tools"), "tools")
    choice, only = read_choice(body.get("tool_choice"))
    is_parallel = PARALLEL_TOOL_CALLS.read(body)
    return make_tool_use(tools, choice, only=only, is_parallel=is_parallel)


def _max_reasoning_tokens(body: Mapping[str, Any], model: ModelFacts) -> int | None:
    budget = THINKING_TOKEN_BUDGET.read(body)
    if budget is not None:
        check_reasoning_limit(model.format, "thinking_token_budget")
    return budget


def read_model_name(body: Mapping[str, Any], model: ModelFacts) -> str:
    """Return the name under which the client asks for the served model."""
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("'model' must be a non-empty string.", param="model")
    check_model_name(name, model)
    return name


def check_model_name(name: str, model: ModelFacts) -> None:
    """Refuse any name but those of the served model."""
    if name not in model.all_names:
        raise ModelNotFound(
            f"The model {shown_name(name)!r} does not exist or you do not have access to it.", param="model"
        )


def read_max_output_tokens(body: Mapping[str, Any], old_field: IntegerField) -> int | None:
    """Return the limit under its old name or its newer one; None for none."""
    old = old_field.read(body)
    new = MAX_COMPLETION_TOKENS.read(body)
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "'max_tokens' and 'max_completion_tokens' differ; give one of them.", param="max_completion_tokens"
        )
    return old if new is None else new


def read_chat_prompt(body: Mapping[str, Any], model: ModelFacts) -> ChatPrompt:
    """Return the messages, how the template ends them, and what is set in it."""
    messages = _messages(body)
    check_results(messages, "messages")
    continues = CONTINUE_FINAL_MESSAGE.read(body)
    adds = read_boolean(body, "add_generation_prompt", default=not continues)
    if continues and adds:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="continue_final_message",
        )
    if continues and messages[-1].role != "assistant":
        raise InvalidRequest(
            "'continue_final_message' needs a last message of the role 'assistant'.",
            param="continue_final_message",
        )
    if continues and messages[-1].tool_calls:
        raise InvalidRequest(
            "'continue_final_message' cannot go on with a message that calls tools; send their results behind it.",
            param="continue_final_message",
        )
    variables = merged_variables(
        read_template_variables(body.get("chat_template_kwargs"), model.format),
        effort_variables(body.get("reasoning_effort"), model.format, "reasoning_effort"),
        "reasoning_effort",
    )
    return ChatPrompt(messages, add_generation_prompt=adds, continue_final_message=continues, variables=variables)


def _messages(body: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise InvalidRequest("'messages' must be a list of messages.", param="messages")
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"'messages' holds {len(messages)} messages; at most {MAX_MESSAGES} are taken.", param="messages"
        )
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: Any, path: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise InvalidRequest(f"'{path}' must be an object with 'role' and 'content'.", param=path)
    role = message.get("role")
    if isinstance(role, str) and role in _UNSUPPORTED_ROLES:
        raise UnsupportedField(f"The role {role!r} is not supported by this server.", param=f"{path}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"'{path}.role' must be one of {', '.join(_ROLES)}.", param=f"{path}.role")
    check_message_fields(message, role, path)
    calls = read_tool_calls(message.get("tool_calls"), f"{path}.tool_calls") if role == "assistant" else ()
    reasoning = _reasoning(message, path) if role == "assistant" else None
    # A message that calls tools, or that was cut while it thought, need not say anything.
    needs_content = not calls and reasoning is None
    has_content = needs_content or message.get("content") not in (None, [])
    content = _content(message.get("content"), f"{path}.content") if has_content else ""
    call_id = message.get("tool_call_id")
    if role == "tool" and not isinstance(call_id, str):
        raise InvalidRequest(f"'{path}.tool_call_id' must be a string.", param=f"{path}.tool_call_id")
    return ChatMessage(
        _ROLES[role],
        content,
        name=_speaker_name(message, path),
        tool_calls=calls,
        tool_call_id=call_id,
        reasoning=reasoning,
    )


def _speaker_name(message: Mapping[str, Any], path: str) -> str | None:
    """Return the name that tells speakers of one role apart, for templates that write it; an empty one is none."""
    name = message.get("name")
    if name is not None and (not isinstance(name, str) or len(name) > MAX_SPEAKER_NAME_CHARACTERS):
        raise InvalidRequest(
            f"'{path}.name' must be a string of at most {MAX_SPEAKER_NAME_CHARACTERS} characters.",
            param=f"{path}.name",
        )
    return name or None


def _reasoning(message: Mapping[str, Any], path: str) -> str | None:
    """Return what the assistant thought, under the name that answers have here or under vLLM's newer one."""
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidRequest(f"'{path}.{name}' must be a string.", param=f"{path}.{name}")
        return value
    return None


def _content(content: Any, path: str) -> str:
    """Return a message's text; the texts of several parts are joined by a line break."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"'{path}' must be a string or a non-empty list of text parts.", param=path)
    if len(content) > MAX_CONTENT_PARTS:
        raise InvalidRequest(f"'{path}' holds more than {MAX_CONTENT_PARTS} parts.", param=path)
    return "\n".join(
        part["text"] if _is_plain_text(part) else _text_of_part(part, f"{path}[{index}]")
        for index, part in enumerate(content)
    )


def _is_plain_text(part: Any) -> bool:
    """Tell whether a part is what nearly all of tens of thousands are; the others are looked at field by field."""
    return type(part) is dict and len(part) == 2 and part.get("type") == "text" and type(part.get("text")) is str


def _text_of_part(part: Any, path: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"'{path}' must be an object with 'type' and 'text'.", param=path)
    if part["type"] != "text":
        raise UnsupportedField(
            f"'{path}.type' must be 'text'; this model takes no other content.", param=f"{path}.type"
        )
    check_content_part_fields(part, path)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{path}.text' must be a string.", param=f"{path}.text")
    return text


def _num_logprobs(body: Mapping[str, Any]) -> int | None:
    is_wanted = LOGPROBS.read(body)
    count = TOP_LOGPROBS.read(body) or 0
    if count and not is_wanted:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return count if is_wanted else None
