"""Anthropic's Messages API: from a JSON object to a type that cannot be wrong.

Owns the fields of ``/v1/messages`` and ``/v1/messages/count_tokens``, and how they are asked of this server. It
must not know HTTP, tokens or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from libs.errors import InvalidRequest, UnsupportedField
from libs.text import ChatMessage
from services.gateway.generation_options import (
    MAX_STOP_STRING_CHARACTERS,
    MAX_USER_CHARACTERS,
    GenerationOptions,
    parse_generation_options,
)
from services.gateway.openai_schema import MAX_CONTENT_PARTS, MAX_MESSAGES, ModelFacts, read_model_name
from services.gateway.prompts import ChatPrompt
from services.gateway.typed_body import convert_body

MAX_STOP_SEQUENCES: Final = 16
_MAX_TOKENS_BOUND: Final = 2**31 - 1


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A wish to keep a prefix: every prefix is kept here as long as there is room, so it is granted unasked."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    # As answers have it, so that a client may send them back.
    citations: None = None


Blocks = Annotated[list[TextBlock], Meta(min_length=1, max_length=MAX_CONTENT_PARTS)]


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | Blocks


class Metadata(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Recorded in the request's log event."""

    user_id: Annotated[str, Meta(max_length=MAX_USER_CHARACTERS)] | None = None


class CountTokensBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What ``/v1/messages/count_tokens`` takes."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Blocks | None = None


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
    "thinking": _type_is("disabled"),
    "tool_choice": _type_is("none"),
    "tools": _nothing,
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
    options = parse_generation_options(shared, vocab_size=model.vocab_size, max_output_tokens=valid.max_tokens)
    options = replace(
        options,
        stop_strings=tuple(dict.fromkeys(valid.stop_sequences or ())),
        user=None if valid.metadata is None else valid.metadata.user_id,
    )
    return ValidMessages(model=model_name, prompt=_prompt(valid), options=options)


def parse_token_count(body: Mapping[str, Any], model: ModelFacts) -> ChatPrompt:
    """Return the prompt whose tokens are to be counted; raises as ``parse_messages`` does."""
    _refuse_other_blocks(body)
    valid = convert_body(body, CountTokensBody, _NEUTRAL_PROMPT_VALUES)
    read_model_name(body, model)
    return _prompt(valid)


def _prompt(body: CountTokensBody) -> ChatPrompt:
    """Return the turns; those of one side in a row are one, and the answer goes on with the assistant's last."""
    turns: list[ChatMessage] = []
    if body.system is not None:
        turns.append(ChatMessage(role="system", content=_text(body.system)))
    for message in body.messages:
        text = _text(message.content)
        if turns and turns[-1].role == message.role:
            turns[-1] = ChatMessage(role=message.role, content=f"{turns[-1].content}\n{text}")
        else:
            turns.append(ChatMessage(role=message.role, content=text))
    is_begun = turns[-1].role == "assistant"
    return ChatPrompt(tuple(turns), add_generation_prompt=not is_begun, continue_final_message=is_begun)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _refuse_other_blocks(body: Mapping[str, Any]) -> None:
    """Say of images, tools and the like that they are not served, rather than that their type is wrong."""
    messages = body.get("messages")
    contents = [("system", body.get("system"))]
    if isinstance(messages, list):
        contents += [
            (f"messages[{index}].content", message.get("content"))
            for index, message in enumerate(messages)
            if isinstance(message, dict)
        ]
    for path, content in contents:
        for index, block in enumerate(content if isinstance(content, list) else ()):
            kind = block.get("type") if isinstance(block, dict) else None
            if not isinstance(kind, str):
                raise InvalidRequest(
                    f"'{path}[{index}]' must be an object with 'type' and 'text'.", param=f"{path}[{index}]"
                )
            if kind != "text":
                raise UnsupportedField(
                    f"'{path}[{index}].type' must be 'text'; this server takes no other content blocks, neither "
                    "tools nor images.",
                    param=f"{path}[{index}].type",
                )
