"""JSON schemas of the bodies that OpenAI's endpoints and the tokenizer's take, for ``/openapi.json``.

Owns how a field is described that needs more than a type and bounds; the others describe themselves
(``generation_fields``). All bounds are the constants that requests are checked with, and a test holds every bound
here against the parsers. It must not know operations or answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from libs.errors import UnsupportedField
from libs.grammar.grammar import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_LITERAL_CHARACTERS,
    MAX_LITERALS,
    MAX_REGEX_CHARACTERS,
)
from services.gateway.generation_fields import (
    ADD_SPECIAL_TOKENS,
    CONTINUE_FINAL_MESSAGE,
    CONTINUOUS_USAGE,
    INCLUDE_REASONING,
    INCLUDE_USAGE,
    LOGPROBS,
    MAX_COMPLETION_TOKENS,
    MAX_TOKENS,
    MAX_TOKENS_BOUND,
    PARALLEL_TOOL_CALLS,
    RETURN_TOKEN_STRINGS,
    SHARED_FIELDS,
    TEXT_LOGPROBS,
    TEXT_MAX_TOKENS,
    THINKING_TOKEN_BUDGET,
    TOP_LOGPROBS,
)
from services.gateway.generation_options import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_METADATA_KEY_CHARACTERS,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE_CHARACTERS,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_USER_CHARACTERS,
    TRUNCATE_TO_FIT,
)
from services.gateway.openai_fields import (
    COMMON_MESSAGE_FIELDS,
    MESSAGE_FIELDS,
    NEUTRAL_MESSAGE_FIELDS,
    NEUTRAL_PART_FIELDS,
    NEUTRAL_STREAM_OPTIONS,
    NEUTRAL_STRUCTURED_OUTPUTS,
    NEUTRAL_VALUES,
    NeutralField,
)
from services.gateway.openai_schema import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_SPEAKER_NAME_CHARACTERS,
    ModelFacts,
)
from services.gateway.openai_text_schema import MAX_PROMPTS
from services.gateway.reasoning_fields import (
    EFFORTS,
    MAX_TEMPLATE_VALUE_CHARACTERS,
    MAX_TEMPLATE_VARIABLES,
    effort_variables,
)
from services.gateway.request_fields import JsonSchema, RequestField
from services.gateway.tools import MAX_DESCRIPTION_CHARACTERS, MAX_TOOLS, NAME_PATTERN

_NULL: Final[JsonSchema] = {"type": "null"}
_STRING: Final[JsonSchema] = {"type": "string"}
_FLAG: Final[JsonSchema] = {"type": ["boolean", "null"], "default": None}
_TOKEN_NOTE: Final = "Token ids of the model's vocabulary."


def chat_body(names: Sequence[str], model: ModelFacts) -> JsonSchema:
    """Return the schema of what ``/v1/chat/completions`` takes."""
    fields = (*SHARED_FIELDS, LOGPROBS, TOP_LOGPROBS, MAX_TOKENS, MAX_COMPLETION_TOKENS, INCLUDE_REASONING)
    choices = ("NamedToolChoice", "AllowedToolsChoice")
    properties = (
        _generation_properties(names, model.vocab_size)
        | _described((*fields, PARALLEL_TOOL_CALLS))
        | _conversation(model)
        | {
            "tool_choice": {
                "anyOf": [{"enum": ["none", "auto", "required", None]}, *map(_reference, choices)],
                "description": "Whether the model may, must or must not call a tool. Without it auto with tools.",
            },
            "reasoning_effort": {
                "enum": [None, *_efforts(model)],
                "default": None,
                "description": "How long the model thinks, as far as this model can be told.",
            },
            "thinking_token_budget": THINKING_TOKEN_BUDGET.schema()
            if model.format.can_limit_reasoning
            else _NULL | {"default": None, "description": THINKING_TOKEN_BUDGET.description},
        }
    )
    return _body(_with_model_defaults(properties, model), ("model", "messages"))


def text_body(names: Sequence[str], model: ModelFacts) -> JsonSchema:
    """Return the schema of what ``/v1/completions`` takes."""
    fields = (*SHARED_FIELDS, TEXT_LOGPROBS, TEXT_MAX_TOKENS, MAX_COMPLETION_TOKENS, ADD_SPECIAL_TOKENS)
    properties = (
        _generation_properties(names, model.vocab_size)
        | _described(fields)
        | {"prompt": _plain_prompt(model.vocab_size)}
    )
    return _body(_with_model_defaults(properties, model), ("model", "prompt"))


def tokenize_body(names: Sequence[str], model: ModelFacts) -> JsonSchema:
    """Return the schema of what ``/tokenize`` takes: a text, or a conversation."""
    name = {"model": _nullable(model_name(names), "A name of the served model.")}
    prompt = _STRING | {"description": "A text whose control tokens are tokens."}
    text_fields = (ADD_SPECIAL_TOKENS, RETURN_TOKEN_STRINGS)
    none = _NULL | {"description": "The other of the two; null is as good as nothing."}
    text = _closed(name | _described(text_fields) | {"prompt": prompt, "messages": none}, ("prompt",))
    conversation = _closed(
        name | _described((RETURN_TOKEN_STRINGS,)) | _conversation(model) | {"prompt": none}, ("messages",)
    )
    return {"anyOf": [_with_neutral(text, NEUTRAL_VALUES), _with_neutral(conversation, NEUTRAL_VALUES)]}


def detokenize_body(names: Sequence[str], vocab_size: int) -> JsonSchema:
    """Return the schema of what ``/detokenize`` takes."""
    tokens = {"type": "array", "items": _token_id(vocab_size), "description": _TOKEN_NOTE}
    return _body(
        {"model": _nullable(model_name(names), "A name of the served model."), "tokens": tokens}, ("tokens",)
    )


def model_name(names: Sequence[str]) -> JsonSchema:
    """Return the schema of a model's name; the names are those that a tenant may use."""
    served = {"enum": list(names)} if names else {}
    return _text(1, None) | served | {"description": "A name of the served model."}


def body_parts() -> dict[str, JsonSchema]:
    """Return the schemas that bodies refer to, by their names."""
    return {
        "ChatMessage": {"oneOf": [_reference(name) for name in ("TurnMessage", "AssistantMessage", "ToolMessage")]},
        "TurnMessage": _message(("system", "developer", "user"), {"content": _content()}, required=("content",)),
        "AssistantMessage": _assistant_message(),
        "ToolMessage": _message(
            ("tool",),
            {
                "content": _content(),
                "tool_call_id": _STRING | {"description": "The call before it that this answers."},
            },
            required=("content", "tool_call_id"),
        ),
        "TextPart": _with_neutral(
            _closed({"type": {"const": "text"}, "text": _STRING}, ("type", "text")), NEUTRAL_PART_FIELDS
        ),
        "ToolCall": _tool_call(),
        "Tool": _tool(),
        "NamedToolChoice": _closed(
            {"type": {"const": "function"}, "function": _closed({"name": _function_name()}, ("name",))},
            ("type", "function"),
        )
        | {"description": "The function that must be called; one of tools."},
        "AllowedToolsChoice": _closed(
            {
                "type": {"const": "allowed_tools"},
                "allowed_tools": _closed(
                    {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "minItems": 1, "items": _reference("NamedToolChoice")},
                    },
                    ("mode", "tools"),
                ),
            },
            ("type", "allowed_tools"),
        )
        | {"description": "The functions that may be called; some of tools."},
        "StreamOptions": _with_neutral(
            _closed(_described((INCLUDE_USAGE, CONTINUOUS_USAGE)), ()), NEUTRAL_STREAM_OPTIONS
        ),
        "ResponseFormat": _response_format(),
        "StructuredOutputs": {"anyOf": [_form(name) for name in _FORMS]},
    }


def _with_model_defaults(properties: dict[str, JsonSchema], model: ModelFacts) -> dict[str, JsonSchema]:
    """Return the fields with the model's own values as the defaults of sampling."""
    own = {name: properties[name] | {"default": value} for name, value in model.sampling_defaults.items()}
    return properties | own


def _generation_properties(names: Sequence[str], vocab_size: int) -> dict[str, JsonSchema]:
    """Return the fields that all of OpenAI's generating endpoints have and that are more than a bounded value."""
    return {
        "model": model_name(names),
        "top_p": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "maximum": 1,
            "default": 1,
            "description": "The likeliest tokens with this probability in all are drawn from.",
        },
        "top_k": {
            "type": ["integer", "null"],
            "minimum": -1,
            "maximum": vocab_size,
            "default": -1,
            "description": "So many of the likeliest tokens are drawn from; -1 and 0 keep all.",
        },
        "logit_bias": _logit_bias(vocab_size),
        "allowed_token_ids": _token_ids(vocab_size, MAX_ALLOWED_TOKEN_IDS, "No other tokens are chosen.")
        | {"minItems": 1},
        "stop_token_ids": _token_ids(vocab_size, MAX_STOP_TOKEN_IDS, "Each of them ends the answer."),
        "bad_words": _nullable(
            {"type": "array", "maxItems": MAX_BAD_WORDS, "items": _text(1, MAX_BAD_WORD_CHARACTERS)},
            "The tokens that spell them are not completed.",
        ),
        "stop": _stop(),
        "truncate_prompt_tokens": {
            "anyOf": [
                {"const": TRUNCATE_TO_FIT},
                {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS_BOUND},
                _NULL,
            ],
            "default": None,
            "description": "Only so many tokens are kept, from the prompt's end; -1 keeps what fits.",
        },
        "stream_options": _nullable(_reference("StreamOptions"), "Allowed only with stream."),
        "response_format": _nullable(_reference("ResponseFormat"), "The form of the answer."),
        "structured_outputs": _nullable(_reference("StructuredOutputs"), "The form of the answer, as vLLM has it."),
        "user": _nullable(_text(0, MAX_USER_CHARACTERS), "Recorded in the request's log event."),
        "safety_identifier": _nullable(
            _text(0, MAX_USER_CHARACTERS), "OpenAI's newer name of user; if both are given they are equal."
        ),
        "metadata": _nullable(
            {
                "type": "object",
                "maxProperties": MAX_METADATA_PAIRS,
                "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARACTERS},
                "additionalProperties": _text(0, MAX_METADATA_VALUE_CHARACTERS),
            },
            "Recorded in the request's log event.",
        ),
    }


def _conversation(model: ModelFacts) -> dict[str, JsonSchema]:
    return {
        "tools": _nullable(
            {"type": "array", "maxItems": MAX_TOOLS, "items": _reference("Tool")},
            "Functions that the model may call; each has a name of its own.",
        ),
        "chat_template_kwargs": _nullable(
            _closed({name: _template_value() for name in sorted(model.format.variables)}, ())
            | {"maxProperties": MAX_TEMPLATE_VARIABLES},
            "What the model's template reads beside the conversation.",
        ),
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": _reference("ChatMessage"),
            "description": "The conversation.",
        },
        "add_generation_prompt": {
            "type": ["boolean", "null"],
            "description": "Whether a new turn is opened. Without it true, unless the last message goes on.",
        },
        "continue_final_message": CONTINUE_FINAL_MESSAGE.schema(),
    }


def _template_value() -> JsonSchema:
    return {
        "anyOf": [{"type": ["boolean", "number", "null"]}, _text(0, MAX_TEMPLATE_VALUE_CHARACTERS)],
        "description": "A variable of the model's template.",
    }


def _efforts(model: ModelFacts) -> list[str]:
    """Return the efforts that can be set for the model."""
    found = []
    for effort in EFFORTS:
        with suppress(UnsupportedField):
            effort_variables(effort, model.format, "reasoning_effort")
            found.append(effort)
    return found


def _plain_prompt(vocab_size: int) -> JsonSchema:
    tokens = {"type": "array", "minItems": 1, "items": _token_id(vocab_size)}
    several = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
    return {
        "anyOf": [_STRING, several | {"items": _STRING}, tokens, several | {"items": tokens}],
        "description": "A string, token ids, or several of either, which are answered together.",
    }


def _logit_bias(vocab_size: int) -> JsonSchema:
    biases = {
        "type": "object",
        "maxProperties": MAX_LOGIT_BIASES,
        "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$", "maxLength": len(str(vocab_size))},
        "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
    }
    return _nullable(biases, "Added to the logits of tokens of the vocabulary, which are named by their ids.")


def _stop() -> JsonSchema:
    string = _text(1, MAX_STOP_STRING_CHARACTERS)
    return {
        "anyOf": [string, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": string}, _NULL],
        "default": None,
        "description": "Strings that end the answer and are no part of it.",
    }


def _content() -> JsonSchema:
    parts = {"type": "array", "minItems": 1, "maxItems": MAX_CONTENT_PARTS, "items": _reference("TextPart")}
    return {"anyOf": [_STRING, parts], "description": "Text; parts are joined by line breaks."}


def _message(roles: Sequence[str], properties: Mapping[str, JsonSchema], required: Sequence[str]) -> JsonSchema:
    name = _nullable(
        _text(0, MAX_SPEAKER_NAME_CHARACTERS), "Who speaks, among others of the role; for templates that write it."
    )
    served = MESSAGE_FIELDS.get(roles[0], COMMON_MESSAGE_FIELDS)
    assert served == {"role", "name", *properties}, f"messages of {roles} have {sorted(served)}"
    message = _closed({"role": {"enum": list(roles)}, "name": name, **properties}, ("role", *required))
    return _with_neutral(message, NEUTRAL_MESSAGE_FIELDS)


def _assistant_message() -> JsonSchema:
    calls = {"type": "array", "maxItems": MAX_TOOLS, "items": _reference("ToolCall")}
    message = _message(
        ("assistant",),
        {
            "content": _nullable({"anyOf": [_content(), {"const": []}]}, "What it said."),
            "tool_calls": _nullable(calls, "What it called."),
            "reasoning_content": _nullable(_STRING, "What it thought."),
            "reasoning": _nullable(_STRING, "The same, as newer versions of vLLM name it."),
        },
        required=(),
    )
    # A message that calls tools need not say anything, nor one that was cut while it was thought of.
    says = {"required": ["content"], "properties": {"content": {"not": {"enum": [None, []]}}}}
    acts = {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}
    thinks = [
        {"required": [name], "properties": {name: {"not": _NULL}}} for name in ("reasoning_content", "reasoning")
    ]
    return message | {"anyOf": [says, acts, *thinks]}


def _tool_call() -> JsonSchema:
    function = _closed(
        {
            "name": _function_name(),
            "parsed_arguments": {"description": "Made of the arguments by a client; it changes nothing."},
            "arguments": {
                "type": ["string", "object"],
                "pattern": r"^\s*(\{|$)",
                "contentMediaType": "application/json",
                "description": "A JSON object as text, none for an empty one; or the object itself.",
            },
        },
        ("name", "arguments"),
    )
    place = {"description": "Its place in the message, as streams have it; it changes nothing."}
    return _closed(
        {"id": _STRING, "type": {"const": "function"}, "function": function, "index": place}, ("id", "function")
    )


def _tool() -> JsonSchema:
    parameters = {"type": "object", "properties": {"type": {"const": "object"}}}
    function = _closed(
        {
            "name": _function_name(),
            "description": _nullable(_text(0, MAX_DESCRIPTION_CHARACTERS), "What it is for, as the model is told."),
            "parameters": _nullable(parameters, "A JSON schema that can be enforced; without it there are none."),
            "strict": _FLAG | {"description": "Arguments are always valid for the parameters."},
        },
        ("name",),
    )
    return _closed({"type": {"const": "function"}, "function": function}, ("type", "function"))


def _response_format() -> JsonSchema:
    named = _closed(
        {
            "name": {"type": "string", "pattern": NAME_PATTERN},
            "description": _nullable(_STRING, "What it is for."),
            "schema": {"type": "object", "description": "A JSON schema that can be enforced."},
            "strict": _FLAG | {"description": "The answer is always valid for the schema."},
        },
        ("name", "schema"),
    )
    return {
        "oneOf": [
            _closed({"type": {"enum": ["text", "json_object"]}}, ("type",)),
            _closed({"type": {"const": "json_schema"}, "json_schema": named}, ("type", "json_schema")),
        ]
    }


# Of ``structured_outputs``, one at a time.
_FORMS: Final[Mapping[str, JsonSchema]] = {
    "json": {"type": ["object", "string"], "description": "A JSON schema, as an object or as JSON."},
    "json_object": {"const": True, "description": "Any JSON object."},
    "regex": {"type": "string", "minLength": 1, "maxLength": MAX_REGEX_CHARACTERS},
    "choice": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_LITERALS,
        "items": {"type": "string", "minLength": 1, "maxLength": MAX_LITERAL_CHARACTERS},
    },
    "grammar": {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_GRAMMAR_CHARACTERS,
        "description": "In llguidance's Lark, or in llama.cpp's GBNF.",
    },
}


def _form(name: str) -> JsonSchema:
    others = {other: _NULL for other in _FORMS if other != name}
    return _with_neutral(_closed({name: _FORMS[name], **others}, (name,)), NEUTRAL_STRUCTURED_OUTPUTS)


def _function_name() -> JsonSchema:
    return {"type": "string", "pattern": NAME_PATTERN}


def _token_id(vocab_size: int) -> JsonSchema:
    return {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}


def _token_ids(vocab_size: int, max_count: int, description: str) -> JsonSchema:
    return {
        "type": ["array", "null"],
        "maxItems": max_count,
        "items": _token_id(vocab_size),
        "default": None,
        "description": description,
    }


def _text(min_length: int, max_length: int | None) -> JsonSchema:
    bounds = {"minLength": min_length} if min_length else {}
    return {"type": "string"} | bounds | ({} if max_length is None else {"maxLength": max_length})


def _nullable(schema: JsonSchema, description: str | None = None) -> JsonSchema:
    found: JsonSchema = {"anyOf": [schema, _NULL], "default": None}
    return found if description is None else found | {"description": description}


def _described(fields: Iterable[RequestField]) -> dict[str, JsonSchema]:
    return {field.name: field.schema() for field in fields}


def _body(properties: Mapping[str, JsonSchema], required: Sequence[str]) -> JsonSchema:
    return _with_neutral(_closed(properties, required), NEUTRAL_VALUES)


def _closed(properties: Mapping[str, JsonSchema], required: Sequence[str]) -> JsonSchema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def _with_neutral(schema: JsonSchema, neutral: Mapping[str, NeutralField]) -> JsonSchema:
    """Add the fields that are known and not served."""
    served: Mapping[str, Any] = schema["properties"]
    others = {name: values.schema() for name, values in neutral.items() if name not in served}
    return schema | {"properties": dict(served) | others}


def _reference(name: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{name}"}
