"""Every field of a generating request that OpenAI or vLLM define: what is served, and what changes nothing.

Owns the table. A field that is known and not served is accepted only with a value that changes nothing, so that
clients that send their defaults work and nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final

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
    "max_completion_tokens",
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


def _null(value: Any) -> bool:  # Any: a value of a JSON document, here and below.
    return value is None


def _one_of(*neutral: Any) -> Callable[[Any], bool]:
    """Accept null and these values; a boolean is not a number here although it is one in Python."""
    return lambda value: value is None or any(type(value) is type(one) and value == one for one in neutral)


def _number(neutral: float) -> Callable[[Any], bool]:
    return lambda value: value is None or (type(value) in (int, float) and value == neutral)


def _empty(value: Any) -> bool:
    return value is None or value in ([], {})


_OFF, _ON, _ONE = _one_of(False), _one_of(True), _number(1)

# Fields known and not served, each with the test for the values that change nothing.
_NEUTRAL_VALUES: Final[Mapping[str, Callable[[Any], bool]]] = {
    # OpenAI
    "audio": _null,
    "function_call": _one_of("none"),
    "functions": _empty,
    "modalities": _one_of(["text"]),
    "moderation": _null,
    "parallel_tool_calls": _one_of(True, False),
    "prediction": _null,
    "prompt_cache_key": _null,
    "prompt_cache_options": _null,
    "prompt_cache_retention": _null,
    "reasoning_effort": _one_of("none"),
    "service_tier": _one_of("auto", "default"),
    "store": _OFF,
    "tool_choice": _one_of("none"),
    "tools": _empty,
    "top_logprobs": _null,
    "verbosity": _null,
    "web_search_options": _null,
    # vLLM and its relatives
    "add_special_tokens": _OFF,
    "best_of": _ONE,
    "cache_salt": _null,
    "chat_template": _null,
    "chat_template_kwargs": _empty,
    "documents": _empty,
    "guided_decoding_backend": _null,
    "guided_whitespace_pattern": _null,
    "include_reasoning": _one_of(True, False),
    "kv_transfer_params": _null,
    "length_penalty": _ONE,
    "logits_processors": _empty,
    "lora": _null,
    "media_io_kwargs": _empty,
    "mm_processor_kwargs": _empty,
    "repetition_detection": _null,
    "request_id": _null,
    "return_tokens_as_token_ids": _OFF,
    "spaces_between_special_tokens": _ON,
    "suffix": _null,
    "thinking_token_budget": _null,
    "use_beam_search": _OFF,
    "vllm_xargs": _empty,
}

# Names that vLLM has given up, and what takes their place.
_RENAMED: Final[Mapping[str, str]] = {
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
}

# Of these a value is legal and served only in part.
_NEUTRAL_STREAM_OPTIONS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "include_obfuscation": _OFF,
}
_NEUTRAL_STRUCTURED_OUTPUTS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "disable_additional_properties": _OFF,
    "disable_any_whitespace": _OFF,
    "disable_fallback": _one_of(True, False),
    "structural_tag": _null,
    "whitespace_pattern": _null,
}
_NEUTRAL_MESSAGE_FIELDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    # What an answer holds, so that a client may send it back as it came.
    "annotations": _empty,
    "audio": _null,
    "function_call": _null,
    "name": _null,
    "reasoning": _null,
    "reasoning_content": _null,
    "refusal": _null,
    "tool_call_id": _null,
    "tool_calls": _empty,
}
# What messages of some roles have beside what all have.
_MESSAGE_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "assistant": frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}


def check_chat_fields(body: Mapping[str, Any]) -> None:
    """Refuse fields of a chat completion request that nobody knows or that are not served."""
    _check(body, CHAT_FIELDS, _NEUTRAL_VALUES, path="")


def check_text_fields(body: Mapping[str, Any]) -> None:
    """The same for a (legacy) completion request."""
    _check(body, TEXT_FIELDS, _NEUTRAL_VALUES, path="")


def check_fields(body: Mapping[str, Any], served: frozenset[str]) -> None:
    """The same for a request that does not generate and serves these fields."""
    _check(body, served, _NEUTRAL_VALUES, path="")


def check_stream_options(options: Mapping[str, Any]) -> None:
    """The same for ``stream_options``."""
    _check(
        options,
        frozenset({"include_usage", "continuous_usage_stats"}),
        _NEUTRAL_STREAM_OPTIONS,
        path="stream_options.",
    )


def check_structured_outputs(options: Mapping[str, Any]) -> None:
    """The same for ``structured_outputs``."""
    _check(
        options,
        frozenset({"json", "json_object", "regex", "choice", "grammar"}),
        _NEUTRAL_STRUCTURED_OUTPUTS,
        path="structured_outputs.",
    )


def check_message_fields(message: Mapping[str, Any], role: str, path: str) -> None:
    """The same for one message, for example ``messages[3]``."""
    _check(
        message, _MESSAGE_FIELDS.get(role, frozenset({"role", "content"})), _NEUTRAL_MESSAGE_FIELDS, path=f"{path}."
    )


def check_content_part_fields(part: Mapping[str, Any], path: str) -> None:
    """The same for one part of a message's content."""
    _check(part, frozenset({"type", "text"}), {}, path=f"{path}.")


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
