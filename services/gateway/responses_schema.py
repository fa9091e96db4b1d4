"""OpenAI's Responses API: from a JSON object to a type that cannot be wrong.

Owns the fields of ``/v1/responses``. Nothing is stored here, so each request brings its whole conversation. It must
not know HTTP, tokens or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from libs.errors import InvalidRequest, UnsupportedField
from libs.text import ChatMessage
from services.gateway.generation_fields import MAX_LOGPROBS, MAX_TEMPERATURE
from services.gateway.generation_options import (
    MAX_METADATA_KEY_CHARACTERS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARACTERS,
    MAX_USER_CHARACTERS,
    GenerationOptions,
    parse_generation_options,
)
from services.gateway.openai_fields import AnyText
from services.gateway.openai_schema import MAX_CONTENT_PARTS, MAX_MESSAGES, ModelFacts, read_model_name, with_tools
from services.gateway.prompts import ChatPrompt
from services.gateway.reasoning_fields import effort_variables
from services.gateway.tools import (
    MAX_TOOLS,
    FunctionDescription,
    FunctionName,
    ToolChoice,
    ToolUse,
    check_results,
    make_tool,
    make_tool_call,
    make_tool_use,
    with_own_names,
)
from services.gateway.typed_body import convert_body

_MAX_TOKENS_BOUND: Final = 2**31 - 1
_MAX_ID_CHARACTERS: Final = 256
_ITEM_TYPES: Final = ("message", "function_call", "function_call_output", "reasoning")
_PART_TYPES: Final = ("input_text", "output_text", "reasoning_text")
_Id = Annotated[str, Meta(min_length=1, max_length=_MAX_ID_CHARACTERS)]


class Part(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A piece of text, the client's or of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    # As answers have them, so that a client may send them back.
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class ReasoningPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A piece of what the assistant thought."""

    type: Literal["reasoning_text"]
    text: str


_Status = Literal["in_progress", "completed", "incomplete"]
_Parts = Annotated[list[Part], Meta(min_length=1, max_length=MAX_CONTENT_PARTS)]


class _Item(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", kw_only=True):
    """A part of the conversation."""

    # As answers have them.
    id: str | None = None
    status: _Status | None = None


class MessageItem(_Item, tag="message", kw_only=True, frozen=True):
    """One message; the only item whose type may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Parts
    phase: None = None


class FunctionCallItem(_Item, tag="function_call", kw_only=True, frozen=True):
    """A call of a function, the assistant's."""

    call_id: _Id
    name: FunctionName
    arguments: str
    # As OpenAI's clients have them, whether they are set or not.
    namespace: None = None
    caller: None = None
    is_async: None = msgspec.field(default=None, name="async")


class FunctionCallOutputItem(_Item, tag="function_call_output", kw_only=True, frozen=True):
    """What a call came to."""

    call_id: _Id
    output: str | _Parts


class ReasoningItem(_Item, tag="reasoning", kw_only=True, frozen=True):
    """What the assistant thought."""

    summary: Annotated[list[Any], Meta(max_length=0)] = msgspec.field(default_factory=list)
    content: Annotated[list[ReasoningPart], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    encrypted_content: None = None


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    parameters: dict[str, Any] | None = None
    description: FunctionDescription | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="function"):
    """The function that must be called, or one of those that may be."""

    name: FunctionName


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="allowed_tools"):
    """The functions that may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1, max_length=MAX_TOOLS)]


class _Format(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag_field="type"):
    """The form of the answer."""


class TextForm(_Format, tag="text", frozen=True):
    """Any text."""


class JsonObjectForm(_Format, tag="json_object", frozen=True):
    """A JSON object."""


class JsonSchemaForm(_Format, tag="json_schema", frozen=True):
    """JSON of this schema, enforced whether it is strict or not."""

    name: FunctionName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How the answer's text is."""

    format: TextForm | JsonObjectForm | JsonSchemaForm | None = None
    verbosity: None = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How the model reasons."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


LOGPROBS: Final = "message.output_text.logprobs"
# Reasoning is given in plain, so that there is nothing to encrypt.
_INCLUDED = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
_User = Annotated[str, Meta(max_length=MAX_USER_CHARACTERS)]
_MetadataKey = Annotated[str, Meta(max_length=MAX_METADATA_KEY_CHARACTERS)]
_MetadataValue = Annotated[str, Meta(max_length=MAX_METADATA_VALUE_CHARACTERS)]


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What ``/v1/responses`` takes."""

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS_BOUND)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    stream: bool | None = None
    user: _User | None = None
    safety_identifier: _User | None = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Meta(max_length=MAX_METADATA_PAIRS)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[_INCLUDED], Meta(max_length=len(get_args(_INCLUDED)))] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's log-probabilities are part of the answer."""
        return LOGPROBS in (self.include or ())


def _one_of(*neutral: Any) -> Callable[[Any], bool]:  # Any: a value of a JSON document.
    """Accept null and these values; 0 and false are not the same."""
    return lambda value: value is None or any(type(value) is type(one) and value == one for one in neutral)


# Fields known and not served, each with the test for the values that change nothing.
_NEUTRAL_VALUES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "background": _one_of(False),
    "context_management": _one_of([]),
    "conversation": _one_of(),
    "max_tool_calls": _one_of(),
    "moderation": _one_of(),
    "previous_response_id": _one_of(),
    "prompt": _one_of(),
    "prompt_cache_key": AnyText(),
    "prompt_cache_options": _one_of(),
    "prompt_cache_retention": _one_of(),
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "stream_options": _one_of({}, {"include_obfuscation": False}),
    "truncation": _one_of("disabled"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidResponse:
    """A request for a response in which every value can be served."""

    model: str
    prompt: ChatPrompt
    options: GenerationOptions
    # As the client sent it, which answers repeat.
    body: ResponseBody

    @property
    def prompts(self) -> tuple[ChatPrompt]:
        """The one prompt."""
        return (self.prompt,)


def parse_response(body: Mapping[str, Any], model: ModelFacts) -> ValidResponse:
    """Check every field and return the request.

    Raises:
        InvalidRequest: a value that cannot be served; names the field.
        UnsupportedField: a field, an item or a part that is known and not served.
        ModelNotFound: another model.
    """
    _refuse_storage(body)
    _refuse_other_items(body.get("input"))
    _refuse_other_tools(body.get("tools"))
    valid = convert_body(_with_item_types(body), ResponseBody, _NEUTRAL_VALUES)
    valid = _with_sampling_of(valid, model)
    if valid.top_logprobs and not valid.wants_logprobs:
        raise InvalidRequest(f"'top_logprobs' needs '{LOGPROBS}' in 'include'.", param="top_logprobs")
    options, prompt, tools = _options(valid, model), _prompt(valid, model), _tool_use(valid)
    if tools is not None:
        if valid.wants_logprobs:
            raise UnsupportedField(f"'{LOGPROBS}' cannot be included where tools may be called.", param="include")
        options, prompt = with_tools(options, prompt, tools, model)
    return ValidResponse(model=read_model_name(body, model), prompt=prompt, options=options, body=valid)


def _with_sampling_of(body: ResponseBody, model: ModelFacts) -> ResponseBody:
    """Return the body with the model's own sampling where it says nothing, as the answer repeats it."""
    own = {name: value for name, value in model.sampling_defaults.items() if getattr(body, name, value) is None}
    return msgspec.structs.replace(body, **own)


def _options(body: ResponseBody, model: ModelFacts) -> GenerationOptions:
    shared_names = ("stream", "temperature", "top_p", "user", "safety_identifier", "metadata")
    shared = {name: getattr(body, name) for name in shared_names}
    try:
        options = parse_generation_options(
            shared | {"response_format": _response_format(body)},
            vocab_size=model.vocab_size,
            max_output_tokens=body.max_output_tokens,
            num_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
            defaults=model.sampling_defaults,
        )
    except InvalidRequest as error:
        raise InvalidRequest(_own_path(error.message), param=_own_path(error.param or "") or None) from error
    constraint = options.constraint
    if constraint is not None:
        constraint = replace(constraint, param=_own_path(constraint.param))
    return replace(options, reads_reasoning=True, constraint=constraint)


def _response_format(body: ResponseBody) -> dict[str, Any] | None:
    """Return the form of the answer as chats have it."""
    asked = None if body.text is None else body.text.format
    if isinstance(asked, JsonSchemaForm):
        return {"type": "json_schema", "json_schema": msgspec.structs.asdict(asked)}
    return {"type": "json_object"} if isinstance(asked, JsonObjectForm) else None


def _own_path(text: str) -> str:
    return text.replace("response_format.json_schema", "text.format").replace("response_format", "text.format")


def _tool_use(body: ResponseBody) -> ToolUse | None:
    tools = [
        make_tool(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
            path=f"tools[{index}]",
        )
        for index, tool in enumerate(body.tools or ())
    ]
    only: tuple[str, ...] | None = None
    match body.tool_choice:
        case None:
            choice = None
        case NamedFunction(name=name):
            choice, only = ToolChoice.REQUIRED, (name,)
        case AllowedTools(mode=mode, tools=allowed):
            choice, only = ToolChoice(mode), tuple(tool.name for tool in allowed)
        case word:
            choice = ToolChoice(word)
    is_parallel = body.parallel_tool_calls is not False
    return make_tool_use(with_own_names(tools, "tools"), choice, only=only, is_parallel=is_parallel)


def _prompt(body: ResponseBody, model: ModelFacts) -> ChatPrompt:
    turns = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        turns.append(ChatMessage(role="user", content=body.input))
    else:
        for index, item in enumerate(body.input):
            _add(turns, item, f"input[{index}]")
    check_results(turns, "input")
    effort = None if body.reasoning is None else body.reasoning.effort
    return ChatPrompt(tuple(turns), variables=effort_variables(effort, model.format, "reasoning.effort"))


def _add(turns: list[ChatMessage], item: Item, path: str) -> None:
    """Add an item; what the assistant thought, said and called in a row is one turn."""
    last = turns[-1] if turns and turns[-1].role == "assistant" else None
    match item:
        case ReasoningItem():
            thought = "\n".join(part.text for part in item.content or ())
            turns.append(ChatMessage("assistant", "", reasoning=thought or None))
        case MessageItem(role="assistant") if last is not None and (last.tool_calls or last.reasoning):
            # Text behind calls belongs to their turn, too: results must follow it, and no other turn.
            said = (last.content, _text(item.content))
            turns[-1] = replace(last, content="\n".join(text for text in said if text))
        case MessageItem():
            turns.append(ChatMessage(_role(item), _text(item.content)))
        case FunctionCallItem():
            call = make_tool_call(item.call_id, item.name, item.arguments, path)
            if last is None:
                turns.append(ChatMessage("assistant", "", tool_calls=(call,)))
            else:
                turns[-1] = replace(last, tool_calls=(*last.tool_calls, call))
        case FunctionCallOutputItem():
            turns.append(ChatMessage("tool", _text(item.output), tool_call_id=item.call_id))


def _role(item: MessageItem) -> str:
    return "system" if item.role == "developer" else item.role


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _with_item_types(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body with the type of messages, which clients may leave out."""
    items = body.get("input")
    if not isinstance(items, list):
        return body
    typed = [{"type": "message"} | item if isinstance(item, dict) else item for item in items]
    return {**body, "input": typed}


def _refuse_other_tools(tools: Any) -> None:
    """Say of searches and the like that they are not served, rather than that their type is wrong."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            path = f"tools[{index}].type"
            raise UnsupportedField(f"'{path}' must be 'function'; this server has no tools of its own.", param=path)


def _refuse_storage(body: Mapping[str, Any]) -> None:
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise UnsupportedField(
                f"'{name}' is not served: this server keeps no responses. Send the whole conversation as 'input'.",
                param=name,
            )
    if body.get("store") is True:
        raise UnsupportedField(
            "'store' cannot be true: this server keeps no responses. Leave it out or send false.", param="store"
        )


def _refuse_other_items(items: Any) -> None:
    """Say of images and the like that they are not served, rather than that their type is wrong."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        kind = item.get("type")
        if isinstance(kind, str) and kind not in _ITEM_TYPES:
            raise UnsupportedField(
                f"'input[{index}].type' must be one of {', '.join(_ITEM_TYPES)}; this server takes no other items.",
                param=f"input[{index}].type",
            )
        content = item.get("content")
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            part_kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(part_kind, str) and part_kind not in _PART_TYPES:
                path = f"input[{index}].content[{part_index}].type"
                raise UnsupportedField(
                    f"'{path}' must be 'input_text' or 'output_text'; this model takes no other content.",
                    param=path,
                )
