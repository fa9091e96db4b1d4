"""Anthropic's Messages API: from a JSON object to a type that cannot be wrong.

Owns the fields of ``/v1/messages`` and ``/v1/messages/count_tokens``, and how they are asked of this server. It
must not know HTTP, tokens or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from libs.errors import InvalidRequest, UnsupportedField
from libs.text import ChatMessage, ToolCall
from services.gateway.generation_options import (
    MAX_STOP_STRING_CHARACTERS,
    MAX_USER_CHARACTERS,
    GenerationOptions,
    parse_generation_options,
)
from services.gateway.openai_schema import MAX_CONTENT_PARTS, MAX_MESSAGES, ModelFacts, read_model_name, with_tools
from services.gateway.prompts import ChatPrompt
from services.gateway.reasoning_fields import check_reasoning_limit, switch_variables
from services.gateway.tools import (
    MAX_TOOLS,
    FunctionDescription,
    LongFunctionName,
    ToolChoice,
    ToolUse,
    check_results,
    make_tool,
    make_tool_call,
    make_tool_use,
    with_own_names,
)
from services.gateway.typed_body import convert_body

MAX_STOP_SEQUENCES: Final = 16
_MAX_TOKENS_BOUND: Final = 2**31 - 1
_MAX_ID_CHARACTERS: Final = 256
_Id = Annotated[str, Meta(min_length=1, max_length=_MAX_ID_CHARACTERS)]


class _Block(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type"):
    """A part of a turn."""


class _Choice(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type"):
    """One of several."""


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A wish to keep a prefix: every prefix is kept here as long as there is room, so it is granted unasked."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(_Block, tag="text", frozen=True):
    """A piece of text."""

    text: str
    cache_control: CacheControl | None = None
    # As answers have it, so that a client may send them back.
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(_Block, tag="thinking", frozen=True):
    """What the assistant thought; its signature is empty here, and not looked at."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Block, tag="tool_use", frozen=True):
    """A call of a tool, the assistant's."""

    id: _Id
    name: LongFunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: None = None


class ToolResultBlock(_Block, tag="tool_result", frozen=True):
    """What a call came to; an error is told to the model as one."""

    tool_use_id: _Id
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
Blocks = Annotated[list[Block], Meta(min_length=1, max_length=MAX_CONTENT_PARTS)]


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | Blocks


class ToolBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call; ``input_schema`` is enforced whether it is strict or not."""

    name: LongFunctionName
    input_schema: dict[str, Any]
    description: FunctionDescription | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    # Inputs are streamed as they come for every tool.
    eager_input_streaming: bool | None = None


class AutoChoice(_Choice, tag="auto", frozen=True):
    """The model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(_Choice, tag="any", frozen=True):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class ToolChoiceBody(_Choice, tag="tool", frozen=True):
    """The model must call this tool."""

    name: LongFunctionName
    disable_parallel_tool_use: bool | None = None


class NoChoice(_Choice, tag="none", frozen=True):
    """The model is told of no tool."""


class ThinkingOn(_Choice, tag="enabled", frozen=True):
    """The model thinks before it answers, at most so long."""

    budget_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS_BOUND)]


class ThinkingAdaptive(_Choice, tag="adaptive", frozen=True):
    """The model thinks as long as it likes."""


class ThinkingOff(_Choice, tag="disabled", frozen=True):
    """The model answers at once."""


class Metadata(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Recorded in the request's log event."""

    user_id: Annotated[str, Meta(max_length=MAX_USER_CHARACTERS)] | None = None


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What ``/v1/messages/count_tokens`` takes."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    tools: Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoiceBody | NoChoice | None = None
    thinking: ThinkingOn | ThinkingAdaptive | ThinkingOff | None = None


class MessagesBody(CountTokensBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What ``/v1/messages`` takes."""

    max_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS_BOUND)]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_STRING_CHARACTERS)]],
            Meta(max_length=MAX_STOP_SEQUENCES),
        ]
        | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    metadata: Metadata | None = None


def _nothing(value: Any) -> bool:  # Any: a value of a JSON document, here and below.
    return value in (None, [], {})


def _type_is(*types: str) -> Callable[[Any], bool]:
    return lambda value: value is None or (isinstance(value, dict) and value.get("type") in types)


# Fields known and not served, each with the test for the values that change nothing.
_NEUTRAL_PROMPT_VALUES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "cache_control": _type_is("ephemeral"),
    "context_management": _nothing,
    "mcp_servers": _nothing,
    "output_config": _nothing,
    "output_format": _nothing,
}
_NEUTRAL_VALUES: Final = {
    **_NEUTRAL_PROMPT_VALUES,
    "container": _nothing,
    "inference_geo": _nothing,
    "service_tier": lambda value: value in (None, "auto", "standard_only"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidMessages:
    """A request for a message in which every value can be served."""

    model: str
    prompt: ChatPrompt
    options: GenerationOptions

    @property
    def prompts(self) -> tuple[ChatPrompt]:
        """The one prompt."""
        return (self.prompt,)


def parse_messages(body: Mapping[str, Any], model: ModelFacts) -> ValidMessages:
    """Check every field and return the request.

    Raises:
        InvalidRequest: a value that cannot be served; names the field.
        UnsupportedField: a field or block that is known and not served.
        ModelNotFound: another model.
    """
    _refuse_other_blocks(body)
    valid = convert_body(body, MessagesBody, _NEUTRAL_VALUES)
    model_name = read_model_name(body, model)
    shared = {
        "stream": valid.stream,
        "temperature": valid.temperature,
        "top_p": valid.top_p,
        "top_k": None if valid.top_k is None else min(valid.top_k, model.vocab_size),
    }
    options = parse_generation_options(
        shared,
        vocab_size=model.vocab_size,
        max_output_tokens=valid.max_tokens,
        defaults=model.sampling_defaults,
    )
    options = replace(
        options,
        stop_strings=tuple(dict.fromkeys(valid.stop_sequences or ())),
        user=None if valid.metadata is None else valid.metadata.user_id,
        reads_reasoning=True,
        max_reasoning_tokens=_max_reasoning_tokens(valid, model),
    )
    prompt, tools = _prompt(valid, model), _tool_use(valid)
    if tools is not None:
        options, prompt = with_tools(options, prompt, tools, model)
    return ValidMessages(model=model_name, prompt=prompt, options=options)


def parse_token_count(body: Mapping[str, Any], model: ModelFacts) -> ChatPrompt:
    """Return the prompt whose tokens are to be counted; raises as ``parse_messages`` does."""
    _refuse_other_blocks(body)
    valid = convert_body(body, CountTokensBody, _NEUTRAL_PROMPT_VALUES)
    read_model_name(body, model)
    tools = _tool_use(valid)
    told = () if tools is None else tuple(tool.as_value() for tool in tools.tools)
    return replace(_prompt(valid, model), tools=told)


def _prompt(body: CountTokensBody, model: ModelFacts) -> ChatPrompt:
    """Return the turns; those of one side in a row are one, and the answer goes on with the assistant's last."""
    turns: list[ChatMessage] = []
    if body.system is not None and body.system != []:
        turns.append(ChatMessage(role="system", content=_text(body.system)))
    for index, message in enumerate(body.messages):
        for turn in _turns(message, f"messages[{index}]"):
            if turns[-1:] and turns[-1].role == turn.role != "tool":
                turns[-1] = _as_one(turns[-1], turn)
            else:
                turns.append(turn)
    check_results(turns, "messages")
    last = turns[-1]
    if last.tool_calls:
        raise InvalidRequest("The last of 'messages' calls tools; send their results behind it.", param="messages")
    is_begun = last.role == "assistant"
    return ChatPrompt(
        tuple(turns),
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        variables=_variables(body, model),
    )


def _variables(body: CountTokensBody, model: ModelFacts) -> Mapping[str, Any]:
    if body.thinking is None:
        return {}
    return switch_variables(not isinstance(body.thinking, ThinkingOff), model.format, "thinking")


def _max_reasoning_tokens(body: MessagesBody, model: ModelFacts) -> int | None:
    if not isinstance(body.thinking, ThinkingOn):
        return None
    path = "thinking.budget_tokens"
    if body.thinking.budget_tokens >= body.max_tokens:
        raise InvalidRequest(f"'{path}' must be less than 'max_tokens'.", param=path)
    switch_variables(True, model.format, "thinking")
    check_reasoning_limit(model.format, path)
    return body.thinking.budget_tokens


def _tool_use(body: CountTokensBody) -> ToolUse | None:
    tools = [
        make_tool(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
            path=f"tools[{index}]",
            parameters_name="input_schema",
        )
        for index, tool in enumerate(body.tools or ())
    ]
    asked = body.tool_choice
    match asked:
        case None:
            choice = None
        case NoChoice():
            choice = ToolChoice.NONE
        case AutoChoice():
            choice = ToolChoice.AUTO
        case _:
            choice = ToolChoice.REQUIRED
    return make_tool_use(
        with_own_names(tools, "tools"),
        choice,
        only=(asked.name,) if isinstance(asked, ToolChoiceBody) else None,
        is_parallel=isinstance(asked, None | NoChoice) or not asked.disable_parallel_tool_use,
    )


def _turns(message: Message, path: str) -> Iterator[ChatMessage]:
    """Give a turn as messages: results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(message.content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                place = f"{path}.content[{index}]"
                calls.append(make_tool_call(block.id, block.name, block.input, place, arguments_name="input"))
            case ToolResultBlock():
                if texts:
                    yield ChatMessage(message.role, "\n".join(texts))
                    texts = []
                yield ChatMessage("tool", _result(block), tool_call_id=block.tool_use_id)
    if texts or thoughts or calls:
        reasoning = "\n".join(thoughts) or None
        yield ChatMessage(message.role, "\n".join(texts), tool_calls=tuple(calls), reasoning=reasoning)


def _as_one(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return replace(
        first,
        content="\n".join(text for text in (first.content, second.content) if text),
        tool_calls=(*first.tool_calls, *second.tool_calls),
        reasoning="\n".join(text for text in (first.reasoning, second.reasoning) if text) or None,
    )


def _result(block: ToolResultBlock) -> str:
    text = _text(block.content or "")
    return f"Error: {text}" if block.is_error else text


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


_BLOCK_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "tool_result": ("text",),
}


def _refuse_other_blocks(body: Mapping[str, Any]) -> None:
    """Say of images and the like that they are not served, rather than that their type is wrong."""
    _refuse_others_in(body.get("system"), "system", "system")
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        role = message.get("role") if isinstance(message, dict) else None
        if role in ("user", "assistant"):
            _refuse_others_in(message.get("content"), role, f"messages[{index}].content")


def _refuse_others_in(content: Any, place: str, path: str) -> None:
    for index, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"'{path}[{index}]' must be an object with a 'type'.", param=f"{path}[{index}]")
        if kind not in _BLOCK_TYPES[place]:
            served = ", ".join(repr(one) for one in _BLOCK_TYPES[place])
            raise UnsupportedField(
                f"'{path}[{index}].type' must be one of {served} here; this model sees no images or documents.",
                param=f"{path}[{index}].type",
            )
        if kind == "tool_result":
            _refuse_others_in(block.get("content"), kind, f"{path}[{index}].content")
