"""Every field of a generating request that OpenAI or vLLM define: what is served, and what changes nothing.

Owns the table. A field that is known and not served is accepted only with a value that changes nothing, so that
clients that send their defaults work and nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

from libs.errors import InvalidRequest, UnsupportedField

_SHOWN_NAME_CHARACTERS: Final = 64

# What all generating endpoints read.
_SHARED_FIELDS: Final = frozenset(
    {
        "model",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stop",
        "include_stop_str_in_output",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "truncate_prompt_tokens",
        "priority",
        "echo",
        "stream",
        "stream_options",
        "return_token_ids",
        "timings",
        "logprobs",
        "prompt_logprobs",
        "response_format",
        "structured_outputs",
        # Recorded in the log event of the request, like the two after them; they do not change the answer.
        "user",
        "safety_identifier",
        "metadata",
    }
)
TEXT_FIELDS: Final = _SHARED_FIELDS | {"prompt", "add_special_tokens"}
CHAT_FIELDS: Final = _SHARED_FIELDS | {
    "messages",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_effort",
    "include_reasoning",
    "thinking_token_budget",
}


@dataclass(frozen=True, slots=True)
class NeutralValues:
    """Null and the values of a field that change nothing."""

    values: tuple[Any, ...]  # Any: values of a JSON document.

    def __call__(self, value: Any) -> bool:
        """Tell whether a value is one of them; a boolean is not a number here although it is one in Python."""
        return value is None or any(_kind(value) is _kind(one) and value == one for one in self.values)

    def schema(self) -> dict[str, Any]:
        """Return the schema of these values."""
        return {
            "enum": [None, *self.values],
            "description": "Known and not served: only with a value that changes nothing.",
        }


@dataclass(frozen=True, slots=True)
class AnyValue:
    """Any value of a field that a client made of what else it sends, so that the field says nothing."""

    def __call__(self, value: Any) -> bool:
        """Take it."""
        return True

    def schema(self) -> dict[str, Any]:
        """Return the schema of any value."""
        return {"description": "Made of the rest by a client; it changes nothing."}


@dataclass(frozen=True, slots=True)
class AnyText:
    """Null and any string, of a field that helps other servers to find what they have cached; here it is found."""

    def __call__(self, value: Any) -> bool:
        """Take a string."""
        return value is None or isinstance(value, str)

    def schema(self) -> dict[str, Any]:
        """Return the schema of a string or null."""
        return {"type": ["string", "null"], "description": "Prefixes are cached unasked; it changes nothing."}


NeutralField: TypeAlias = NeutralValues | AnyValue | AnyText


def _kind(value: Any) -> type:
    """Return a value's type; a number is one whether it is written with a point or not."""
    return float if type(value) is int else type(value)


def _one_of(*values: Any) -> NeutralValues:
    return NeutralValues(values)


_NULL, _EMPTY, _OFF, _ONE = _one_of(), _one_of([], {}), _one_of(False), _one_of(1)

# Fields known and not served, each with the test for the values that change nothing.
NEUTRAL_VALUES: Final[Mapping[str, NeutralField]] = {
    # OpenAI
    "audio": _NULL,
    "function_call": _one_of("none"),
    "functions": _EMPTY,
    "modalities": _one_of(["text"]),
    "moderation": _NULL,
    "parallel_tool_calls": _one_of(True, False),
    "prediction": _NULL,
    "prompt_cache_key": AnyText(),
    "prompt_cache_options": _NULL,
    "prompt_cache_retention": _NULL,
    "reasoning_effort": _one_of("none"),
    "service_tier": _one_of("auto", "default"),
    "store": _OFF,
    "tool_choice": _one_of("none"),
    "tools": _EMPTY,
    "top_logprobs": _NULL,
    "verbosity": _one_of("medium"),
    "web_search_options": _NULL,
    # vLLM and its relatives
    "add_special_tokens": _OFF,
    "best_of": _ONE,
    "cache_salt": _NULL,
    "chat_template": _NULL,
    "chat_template_kwargs": _EMPTY,
    "documents": _EMPTY,
    "guided_decoding_backend": _NULL,
    "guided_whitespace_pattern": _NULL,
    "include_reasoning": _one_of(True, False),
    "kv_transfer_params": _NULL,
    "length_penalty": _ONE,
    "logits_processors": _EMPTY,
    "lora": _NULL,
    "media_io_kwargs": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "repetition_detection": _NULL,
    "request_id": _NULL,
    "return_tokens_as_token_ids": _OFF,
    # There are none either way, as with every tokenizer of this kind.
    "spaces_between_special_tokens": _one_of(True, False),
    "suffix": _one_of(""),
    "thinking_token_budget": _NULL,
    "use_beam_search": _OFF,
    "vllm_xargs": _EMPTY,
}

# Names that vLLM has given up, and what takes their place.
_RENAMED: Final[Mapping[str, str]] = {
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
}

# Of these a value is legal and served only in part.
NEUTRAL_STREAM_OPTIONS: Final[Mapping[str, NeutralField]] = {
    "include_obfuscation": _OFF,
}
NEUTRAL_STRUCTURED_OUTPUTS: Final[Mapping[str, NeutralField]] = {
    "disable_additional_properties": _OFF,
    "disable_any_whitespace": _OFF,
    "disable_fallback": _one_of(True, False),
    "structural_tag": _NULL,
    "whitespace_pattern": _NULL,
}
NEUTRAL_MESSAGE_FIELDS: Final[Mapping[str, NeutralField]] = {
    # What an answer holds, so that a client may send it back as it came.
    "annotations": _EMPTY,
    "audio": _NULL,
    "function_call": _NULL,
    # What OpenAI's clients have read out of the content.
    "parsed": AnyValue(),
    "reasoning": _NULL,
    "reasoning_content": _NULL,
    "refusal": _NULL,
    "tool_call_id": _NULL,
    "tool_calls": _EMPTY,
}
# What messages of all roles have, and those of some.
COMMON_MESSAGE_FIELDS: Final = frozenset({"role", "content", "name"})
MESSAGE_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "assistant": COMMON_MESSAGE_FIELDS | {"tool_calls", "reasoning_content", "reasoning"},
    "tool": COMMON_MESSAGE_FIELDS | {"tool_call_id"},
}
NEUTRAL_PART_FIELDS: Final[Mapping[str, NeutralField]] = {
    # How clients tell Anthropic and others what to cache.
    "cache_control": AnyValue(),
}


def check_chat_fields(body: Mapping[str, Any]) -> None:
    """Refuse fields of a chat completion request that nobody knows or that are not served."""
    _check(body, CHAT_FIELDS, NEUTRAL_VALUES, path="")


def check_text_fields(body: Mapping[str, Any]) -> None:
    """The same for a (legacy) completion request."""
    _check(body, TEXT_FIELDS, NEUTRAL_VALUES, path="")


def check_fields(body: Mapping[str, Any], served: frozenset[str]) -> None:
    """The same for a request that does not generate and serves these fields."""
    _check(body, served, NEUTRAL_VALUES, path="")


def check_stream_options(options: Mapping[str, Any]) -> None:
    """The same for ``stream_options``."""
    _check(
        options,
        frozenset({"include_usage", "continuous_usage_stats"}),
        NEUTRAL_STREAM_OPTIONS,
        path="stream_options.",
    )


def check_structured_outputs(options: Mapping[str, Any]) -> None:
    """The same for ``structured_outputs``."""
    _check(
        options,
        frozenset({"json", "json_object", "regex", "choice", "grammar"}),
        NEUTRAL_STRUCTURED_OUTPUTS,
        path="structured_outputs.",
    )


def check_message_fields(message: Mapping[str, Any], role: str, path: str) -> None:
    """The same for one message, for example ``messages[3]``."""
    _check(message, MESSAGE_FIELDS.get(role, COMMON_MESSAGE_FIELDS), NEUTRAL_MESSAGE_FIELDS, path=f"{path}.")


def check_content_part_fields(part: Mapping[str, Any], path: str) -> None:
    """The same for one part of a message's content."""
    _check(part, frozenset({"type", "text"}), NEUTRAL_PART_FIELDS, path=f"{path}.")


def _check(
    values: Mapping[str, Any],
    served: frozenset[str],
    neutral_values: Mapping[str, Callable[[Any], bool]],
    *,
    path: str,
) -> None:
    for name, value in values.items():
        if name in served:
            continue
        param = path + name[:_SHOWN_NAME_CHARACTERS]
        if not path and name in _RENAMED:
            if value is None:
                continue
            raise UnsupportedField(f"{name!r} is now called {_RENAMED[name]!r}; send that.", param=name)
        is_neutral = neutral_values.get(name)
        if is_neutral is None:
            raise InvalidRequest(_unknown(param, name, [*served, *neutral_values]), param=param)
        if not is_neutral(value):
            raise UnsupportedField(
                f"{param!r} is not supported by this server with a value that changes the answer; leave it out.",
                param=param,
            )


def _unknown(param: str, name: str, known: list[str]) -> str:
    close = get_close_matches(name[:_SHOWN_NAME_CHARACTERS], known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"Unknown field {param!r}.{hint}"


def check_against(
    values: Mapping[str, Any], served: frozenset[str], neutral_values: Mapping[str, Callable[[Any], bool]]
) -> None:
    """The same for the request of another API, which brings its own tables."""
    _check(values, served, neutral_values, path="")
