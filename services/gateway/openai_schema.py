"""OpenAI's chat completion request: from bytes to a type that cannot be wrong.

Owns the meaning, the type and the bounds of each field. It must not know HTTP, tokens of a prompt or engines.
What is documented here is what clients may send; everything else is a 400 that names the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from libs.errors import InvalidRequest, ModelNotFound, UnsupportedField
from libs.text import ChatMessage
from services.gateway.openai_fields import (
    check_content_part_fields,
    check_message_fields,
    check_request_fields,
    check_stream_options,
)

MAX_MESSAGES: Final = 2048
MAX_CONTENT_PARTS: Final = 2048
MAX_STOP_STRINGS: Final = 4
MAX_STOP_STRING_CHARACTERS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_MODEL_NAME_CHARACTERS: Final = 64
MAX_USER_CHARACTERS: Final = 256
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARACTERS: Final = 64
MAX_METADATA_VALUE_CHARACTERS: Final = 512
MAX_TEMPERATURE: Final = 2.0
# Lower temperatures are greedy.
MIN_SAMPLED_TEMPERATURE: Final = 0.001
_MAX_TOKENS_BOUND: Final = 2**31 - 1
_MIN_SEED, _MAX_SEED = -(2**63), 2**63 - 1

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED_ROLES: Final = frozenset({"tool", "function"})
_SAFE_NAME: Final = re.compile(r"[^\x20-\x7e]")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the schema must know of the served model."""

    name: str
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidChatCompletion:
    """A chat completion request in which every value can be served."""

    model: str
    messages: tuple[ChatMessage, ...]
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    # The client's seed as the engine wants it; None lets the gateway draw one.
    seed: int | None
    # None means: all the room there is.
    max_output_tokens: int | None
    min_output_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    is_streaming: bool
    includes_usage: bool
    # Recorded in the log only.
    user: str | None
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the audit should know of a request even if the rest of it is wrong."""

    model_name: str
    is_streaming: bool


def parse_json(raw: bytes) -> dict[str, Any]:
    """Decode a body that must be a JSON object in UTF-8; NaN, Infinity and lone surrogates are not JSON."""
    try:
        body = orjson.loads(raw)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return body


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
    check_request_fields(body)
    model_name = _model_name(body, model)
    is_streaming = _boolean(body, "stream", default=False)
    max_output_tokens = _max_output_tokens(body)
    return ValidChatCompletion(
        model=model_name,
        messages=_messages(body),
        temperature=_temperature(body),
        top_p=_top_p(body),
        top_k=_top_k(body, model.vocab_size),
        min_p=_number(body, "min_p", default=0.0, low=0.0, high=1.0) or None,
        seed=_seed(body),
        max_output_tokens=max_output_tokens,
        min_output_tokens=_min_output_tokens(body, max_output_tokens),
        stop_strings=_stop_strings(body),
        stop_token_ids=_stop_token_ids(body, model.vocab_size),
        ignore_eos=_boolean(body, "ignore_eos", default=False),
        is_streaming=is_streaming,
        includes_usage=_includes_usage(body, is_streaming=is_streaming),
        user=_user(body),
        metadata=_metadata(body),
    )


def _model_name(body: Mapping[str, Any], model: ModelFacts) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("'model' must be a non-empty string.", param="model")
    check_model_name(name, model)
    return name


def check_model_name(name: str, model: ModelFacts) -> None:
    """Refuse any name but the served model's."""
    if name != model.name:
        raise ModelNotFound(
            f"The model {shown_name(name)!r} does not exist or you do not have access to it.", param="model"
        )


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
    check_message_fields(message, path)
    return ChatMessage(role=_ROLES[role], content=_content(message.get("content"), f"{path}.content"))


def _content(content: Any, path: str) -> str:
    """Return a message's text; the texts of several parts are joined by a line break."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"'{path}' must be a string or a non-empty list of text parts.", param=path)
    if len(content) > MAX_CONTENT_PARTS:
        raise InvalidRequest(f"'{path}' holds more than {MAX_CONTENT_PARTS} parts.", param=path)
    return "\n".join(_text_of_part(part, f"{path}[{index}]") for index, part in enumerate(content))


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


def _temperature(body: Mapping[str, Any]) -> float:
    temperature = _number(body, "temperature", default=1.0, low=0.0, high=MAX_TEMPERATURE)
    # So low, a draw differs from the likeliest token only where two logits are equal, by chance.
    return 0.0 if temperature < MIN_SAMPLED_TEMPERATURE else temperature


def _top_p(body: Mapping[str, Any]) -> float | None:
    top_p = _number(body, "top_p", default=1.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise InvalidRequest("'top_p' must be greater than 0 and at most 1.", param="top_p")
    return None if top_p == 1.0 else top_p


def _top_k(body: Mapping[str, Any], vocab_size: int) -> int | None:
    """Return how many tokens to keep; -1 and 0 keep all, as in vLLM and SGLang."""
    top_k = _integer(body, "top_k", low=-1, high=vocab_size)
    return None if top_k in (None, -1, 0) else top_k


def _seed(body: Mapping[str, Any]) -> int | None:
    seed = _integer(body, "seed", low=_MIN_SEED, high=_MAX_SEED)
    # The engine's seed is unsigned; two's complement keeps different seeds different.
    return None if seed is None else seed % 2**64


def _max_output_tokens(body: Mapping[str, Any]) -> int | None:
    old = _integer(body, "max_tokens", low=1, high=_MAX_TOKENS_BOUND)
    new = _integer(body, "max_completion_tokens", low=1, high=_MAX_TOKENS_BOUND)
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "'max_tokens' and 'max_completion_tokens' differ; give one of them.", param="max_completion_tokens"
        )
    return old if new is None else new


def _min_output_tokens(body: Mapping[str, Any], max_output_tokens: int | None) -> int:
    min_tokens = _integer(body, "min_tokens", low=0, high=_MAX_TOKENS_BOUND) or 0
    if max_output_tokens is not None and min_tokens > max_output_tokens:
        raise InvalidRequest("'min_tokens' must not be greater than 'max_tokens'.", param="min_tokens")
    return min_tokens


def _stop_strings(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise InvalidRequest("'stop' must be a string or a list of strings.", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"'stop' takes at most {MAX_STOP_STRINGS} strings.", param="stop")
    if not all(1 <= len(string) <= MAX_STOP_STRING_CHARACTERS for string in strings):
        raise InvalidRequest(
            f"Each string of 'stop' must have 1 to {MAX_STOP_STRING_CHARACTERS} characters.", param="stop"
        )
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(body: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    token_ids = body.get("stop_token_ids")
    if token_ids is None:
        return ()
    if not isinstance(token_ids, list) or len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"'stop_token_ids' must be a list of at most {MAX_STOP_TOKEN_IDS} token ids.", param="stop_token_ids"
        )
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in token_ids):
        raise InvalidRequest(
            f"Each of 'stop_token_ids' must be an integer from 0 to {vocab_size - 1}.", param="stop_token_ids"
        )
    return tuple(dict.fromkeys(token_ids))


def _includes_usage(body: Mapping[str, Any], *, is_streaming: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not is_streaming:
        raise InvalidRequest("'stream_options' is allowed only with 'stream': true.", param="stream_options")
    if not isinstance(options, dict):
        raise InvalidRequest("'stream_options' must be an object.", param="stream_options")
    check_stream_options(options)
    return _boolean(options, "include_usage", default=False, path="stream_options.")


def _user(body: Mapping[str, Any]) -> str | None:
    """Return who the client says that its user is; ``safety_identifier`` is OpenAI's newer name for ``user``."""
    found: str | None = None
    for name in ("user", "safety_identifier"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > MAX_USER_CHARACTERS:
            raise InvalidRequest(
                f"'{name}' must be a string of at most {MAX_USER_CHARACTERS} characters.", param=name
            )
        if found is not None and value != found:
            raise InvalidRequest("'user' and 'safety_identifier' differ; give one of them.", param=name)
        found = value
    return found


def _metadata(body: Mapping[str, Any]) -> Mapping[str, str]:
    metadata = body.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA_PAIRS:
        raise InvalidRequest(
            f"'metadata' must be an object with at most {MAX_METADATA_PAIRS} pairs.", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS or not isinstance(value, str):
            raise InvalidRequest("'metadata' must map short names to strings.", param="metadata")
        if len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise InvalidRequest(
                f"A value of 'metadata' is longer than {MAX_METADATA_VALUE_CHARACTERS} characters.",
                param="metadata",
            )
    return metadata


def _boolean(body: Mapping[str, Any], name: str, *, default: bool, path: str = "") -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{path}{name}' must be true or false.", param=f"{path}{name}")
    return value


def _number(body: Mapping[str, Any], name: str, *, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    # A boolean is an int in Python, and not a number for a client.
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"'{name}' must be a number from {low:g} to {high:g}.", param=name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, *, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"'{name}' must be an integer from {low} to {high}.", param=name)
    return value
