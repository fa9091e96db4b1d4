"""The OpenAPI document of a gateway, made of what checks requests.

Owns which operations it lists. Bodies that are typed are described by their types to the last bound; of the others,
whose values are checked by code, the document has the names from the tables that refuse all other names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.gateway.anthropic_schema import CountTokensBody, MessagesBody
from services.gateway.openai_fields import CHAT_FIELDS, TEXT_FIELDS
from services.gateway.responses_schema import ResponseBody
from services.gateway.tokenization import DETOKENIZE_FIELDS, TOKENIZE_CHAT_FIELDS, TOKENIZE_TEXT_FIELDS

_VERSION: Final = "3.1.0"
_JSON: Final = "application/json"
_SECURITY: Final[list[dict[str, list[str]]]] = [{"bearer": []}, {"header": []}]
_TYPED_BODIES: Final = (MessagesBody, CountTokensBody, ResponseBody)


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    # The name of the body's schema.
    body: str | None = None
    is_streamed: bool = False
    is_open: bool = False
    answer_type: str = _JSON
    error: str = "OpenAIError"


_OPERATIONS: Final = (
    _Operation("post", "/v1/chat/completions", "Answer a conversation.", "ChatCompletionBody", is_streamed=True),
    _Operation("post", "/v1/completions", "Go on with plain prompts.", "TextCompletionBody", is_streamed=True),
    _Operation("post", "/v1/responses", "Answer without storage.", "ResponseBody", is_streamed=True),
    _Operation(
        "post", "/v1/messages", "Answer a conversation.", "MessagesBody", is_streamed=True, error="AnthropicError"
    ),
    _Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        "CountTokensBody",
        error="AnthropicError",
    ),
    _Operation("post", "/tokenize", "Show the tokens of a prompt or of messages.", "TokenizeBody"),
    _Operation("post", "/detokenize", "Show the text of tokens.", "DetokenizeBody"),
    _Operation("get", "/v1/models", "List the names of the served model."),
    _Operation("get", "/v1/models/{model_id}", "Describe the served model."),
    _Operation("get", "/openapi.json", "Show this document."),
    _Operation("get", "/livez", "Tell whether the process lives.", is_open=True),
    _Operation("get", "/readyz", "Tell whether an engine takes requests.", is_open=True),
    _Operation("get", "/metrics", "Show figures for Prometheus.", is_open=True, answer_type="text/plain"),
)


def openapi_document() -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": _VERSION,
        "info": {"title": "Octavo", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _describe(operation: _Operation) -> dict[str, Any]:
    answers = {operation.answer_type: {"schema": {"type": "object"} if operation.answer_type == _JSON else {}}}
    if operation.is_streamed:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "operationId": f"{operation.method}{operation.path}".replace("/", "_").translate(_NO_BRACES),
        "summary": operation.summary,
        "security": [] if operation.is_open else _SECURITY,
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "default": {
                "description": "What went wrong.",
                "content": {_JSON: {"schema": _reference(operation.error)}},
            },
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _reference(operation.body)}}}
    if "{model_id}" in operation.path:
        name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        described["parameters"] = [name]
    return described


_NO_BRACES: Final = str.maketrans("", "", "{}")


def _schemas() -> dict[str, Any]:
    _, typed = msgspec.json.schema_components(_TYPED_BODIES, ref_template="#/components/schemas/{name}")
    return dict(typed) | {
        "ChatCompletionBody": _named_fields(CHAT_FIELDS, ("model", "messages")),
        "TextCompletionBody": _named_fields(TEXT_FIELDS, ("model", "prompt")),
        "TokenizeBody": {
            "anyOf": [
                _named_fields(TOKENIZE_TEXT_FIELDS, ("prompt",)),
                _named_fields(TOKENIZE_CHAT_FIELDS, ("messages",)),
            ]
        },
        "DetokenizeBody": _named_fields(DETOKENIZE_FIELDS, ("tokens",)),
        "OpenAIError": _error({"error": _fields("message", "type", "param", "code")}),
        "AnthropicError": _error({"type": {"const": "error"}, "error": _fields("type", "message")}),
    }


def _named_fields(names: Iterable[str], required: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {} for name in sorted(names)},
        "required": list(required),
        "additionalProperties": False,
    }


def _error(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def _fields(*names: str) -> dict[str, Any]:
    nullable = {"type": ["string", "null"]}
    return {"type": "object", "properties": dict.fromkeys(names, nullable), "required": list(names)}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
