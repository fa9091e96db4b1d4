"""OpenAI's Responses API: from a JSON object to a type that cannot be wrong.

Owns the fields of ``/v1/responses``. Nothing is stored here, so each request brings its whole conversation. It must
not know HTTP, tokens or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from libs.errors import UnsupportedField
from libs.text import ChatMessage
from services.gateway.generation_fields import MAX_TEMPERATURE
from services.gateway.generation_options import (
    MAX_METADATA_KEY_CHARACTERS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARACTERS,
    MAX_USER_CHARACTERS,
    GenerationOptions,
    parse_generation_options,
)
from services.gateway.openai_schema import MAX_CONTENT_PARTS, MAX_MESSAGES, ModelFacts, read_model_name
from services.gateway.prompts import ChatPrompt
from services.gateway.typed_body import convert_body

_MAX_TOKENS_BOUND: Final = 2**31 - 1
_PART_TYPES: Final = ("input_text", "output_text")


class Part(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A piece of text, the client's or of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    # As answers have them, so that a client may send them back.
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class Item(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Meta(min_length=1, max_length=MAX_CONTENT_PARTS)]
    type: Literal["message"] = "message"
    # As answers have them.
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: None = None


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


def _one_of(*neutral: Any) -> Callable[[Any], bool]:  # Any: a value of a JSON document.
    """Accept null and these values; 0 and false are not the same."""
    return lambda value: value is None or any(type(value) is type(one) and value == one for one in neutral)


# Fields known and not served, each with the test for the values that change nothing.
_NEUTRAL_VALUES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "background": _one_of(False),
    "context_management": _one_of([]),
    "conversation": _one_of(),
    "include": _one_of([]),
    "max_tool_calls": _one_of(),
    "moderation": _one_of(),
    "parallel_tool_calls": _one_of(True, False),
    "previous_response_id": _one_of(),
    "prompt": _one_of(),
    "prompt_cache_key": _one_of(),
    "prompt_cache_options": _one_of(),
    "prompt_cache_retention": _one_of(),
    "reasoning": _one_of({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "stream_options": _one_of({}, {"include_obfuscation": False}),
    "text": _one_of({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": None}),
    "tool_choice": _one_of("none", "auto"),
    "tools": _one_of([]),
    "top_logprobs": _one_of(0),
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
    valid = convert_body(body, ResponseBody, _NEUTRAL_VALUES)
    shared_names = ("stream", "temperature", "top_p", "user", "safety_identifier", "metadata")
    options = parse_generation_options(
        {name: getattr(valid, name) for name in shared_names},
        vocab_size=model.vocab_size,
        max_output_tokens=valid.max_output_tokens,
    )
    return ValidResponse(model=read_model_name(body, model), prompt=_prompt(valid), options=options, body=valid)


def _prompt(body: ResponseBody) -> ChatPrompt:
    turns = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        turns.append(ChatMessage(role="user", content=body.input))
    else:
        turns += [ChatMessage(role=_role(item), content=_text(item.content)) for item in body.input]
    return ChatPrompt(tuple(turns))


def _role(item: Item) -> str:
    return "system" if item.role == "developer" else item.role


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


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
    """Say of tool calls, images and the like that they are not served, rather than that their type is wrong."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        kind = item.get("type")
        if isinstance(kind, str) and kind != "message":
            raise UnsupportedField(
                f"'input[{index}].type' must be 'message'; this server takes no other items.",
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
