"""The OpenAPI document of a gateway, made of what checks requests.

Owns which operations there are and how each answers. Bodies are described by the types and fields that check them,
errors by the table of errors, answers by ``answer_types``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from libs.errors import ERROR_TABLE
from services.gateway.answer_types import ANSWER_TYPES
from services.gateway.anthropic_answers import ERROR_TYPES
from services.gateway.openai_bodies import (
    body_parts,
    chat_body,
    detokenize_body,
    model_name,
    text_body,
    tokenize_body,
)
from services.gateway.openai_schema import ModelFacts
from services.gateway.request_fields import JsonSchema
from services.gateway.typed_bodies import typed_body_schemas

_VERSION: Final = "3.1.0"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_TEXT: Final = "text/plain"
_DONE: Final = "[DONE]"
_SECURITY: Final[list[dict[str, list[str]]]] = [{"bearer": []}, {"header": []}]
_REFERENCES: Final = "#/components/schemas/{name}"
# The codes of the errors by their status.
_STATUSES: Final = {
    status: [spec.http_code or "no code" for spec in ERROR_TABLE if spec.http_status == status]
    for status in {spec.http_status for spec in ERROR_TABLE}
}
# Documents that are kept: one for each list of names that tenants may use.
_MAX_DOCUMENTS: Final = 64


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    # The names of the schemas: of the answer, of the body, and of an event's data where the answer can be a stream.
    answer: str | None
    body: str | None = None
    event: str | None = None
    is_open: bool = False
    answer_type: str = _JSON
    error: str = "OpenAIError"


_OPERATIONS: Final = (
    _Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        "ChatCompletion",
        body="ChatCompletionBody",
        event="ChatCompletionChunk",
    ),
    _Operation(
        "post",
        "/v1/completions",
        "Go on with plain prompts.",
        "TextCompletion",
        body="TextCompletionBody",
        event="TextCompletionChunk",
    ),
    _Operation(
        "post", "/v1/responses", "Answer without storage.", "Response", body="ResponseBody", event="NamedEvent"
    ),
    _Operation(
        "post",
        "/v1/messages",
        "Answer a conversation.",
        "AnthropicMessage",
        body="MessagesBody",
        event="NamedEvent",
        error="AnthropicError",
    ),
    _Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        "TokenCount",
        body="CountTokensBody",
        error="AnthropicError",
    ),
    _Operation("post", "/tokenize", "Show the tokens of a prompt or of messages.", "Tokens", body="TokenizeBody"),
    _Operation("post", "/detokenize", "Show the text of tokens.", "Text", body="DetokenizeBody"),
    _Operation("get", "/v1/models", "List the names of the served model.", "ModelList"),
    _Operation("get", "/v1/models/{model_id}", "Describe the served model.", "Model"),
    _Operation("get", "/openapi.json", "Show this document.", None),
    _Operation("get", "/livez", "Tell whether the process lives.", "Status", is_open=True),
    _Operation("get", "/readyz", "Tell whether an engine takes requests.", "Status", is_open=True),
    _Operation(
        "get",
        "/health",
        "Tell what /readyz tells, by the name that other servers have for it.",
        "Status",
        is_open=True,
    ),
    _Operation("get", "/metrics", "Show figures for Prometheus.", None, is_open=True, answer_type=_TEXT),
)


class ApiDescription:
    """The document as JSON; it takes some milliseconds to make, so it is kept for each list of names."""

    def __init__(self, model: ModelFacts) -> None:
        self._model = model
        self._documents: dict[tuple[str, ...], bytes] = {}

    def as_json(self, names: tuple[str, ...]) -> bytes:
        """Return the document for who may use the model by these names."""
        if names not in self._documents:
            while len(self._documents) >= _MAX_DOCUMENTS:
                self._documents.pop(next(iter(self._documents)))
            self._documents[names] = orjson.dumps(openapi_document(names, self._model))
        return self._documents[names]


def openapi_document(names: Sequence[str], model: ModelFacts) -> dict[str, Any]:
    """Return the document for who may use the model by these names."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, names)
    return {
        "openapi": _VERSION,
        "info": {"title": "Octavo", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": _schemas(names, model),
            "headers": _HEADERS,
            "responses": _failures("OpenAIError") | _failures("AnthropicError"),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _describe(operation: _Operation, names: Sequence[str]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": f"{operation.method}{operation.path}".replace("/", "_").translate(_NO_BRACES),
        "summary": operation.summary,
        "security": [] if operation.is_open else _SECURITY,
        "responses": {"200": _answer(operation)} | _failures_of(operation),
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: {"schema": _reference(operation.body)}}}
    if "{model_id}" in operation.path:
        described["parameters"] = [
            {"name": "model_id", "in": "path", "required": True, "schema": model_name(names)}
        ]
    return described


_NO_BRACES: Final = str.maketrans("", "", "{}")
_ID: Final = {"schema": {"type": "string"}}
_COUNT: Final = {"schema": {"type": "integer", "minimum": 0}}
# On answers to requests that were counted against limits of these kinds.
_LIMIT_HEADERS: Final = {
    f"X-Ratelimit-{name}-{unit.title()}": schema | {"description": description.format(unit=unit)}
    for unit in ("requests", "tokens")
    for name, schema, description in (
        ("Limit", _COUNT, "How many {unit} a minute the tenant may have."),
        ("Remaining", _COUNT, "How many {unit} it could have now."),
        ("Reset", _ID, "Until it could have all {unit} of a minute, such as 0s, 17ms or 1m0s."),
    )
}
_HEADERS: Final = {
    "X-Request-Id": _ID | {"description": "The client's id of the request if it sent one, else the server's."},
    "X-Octavo-Request-Id": _ID | {"description": "The request's id in logs and in the audit."},
    "Retry-After": {
        "description": "When to come back.",
        "schema": {"type": "integer", "minimum": 1},
    },
    **_LIMIT_HEADERS,
}
_MORE_HEADERS: Final[Mapping[int, Sequence[str]]] = {429: ("Retry-After", *_LIMIT_HEADERS), 503: ("Retry-After",)}


def _answer(operation: _Operation) -> dict[str, Any]:
    whole = {"type": "object"} if operation.answer is None else _reference(operation.answer)
    content = {operation.answer_type: {"schema": whole if operation.answer_type == _JSON else {"type": "string"}}}
    if operation.event is not None:
        content[_EVENTS] = {"schema": _event(operation.event, operation.error)}
    # What can be a stream is generated, and so counted.
    more = () if operation.event is None else _LIMIT_HEADERS
    return {"description": "The answer.", "headers": _headers(*more), "content": content}


def _event(data: str, error: str) -> JsonSchema:
    """Return the schema of one event of a stream, as OpenAPI before 3.2 has it."""
    payload = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [_reference(data), _reference(error)]},
    }
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": _DONE}, payload]}},
        "required": ["data"],
        "description": "One event. Streams of OpenAI's completions end with [DONE], unless an error ended them.",
    }


def _failures_of(operation: _Operation) -> dict[str, Any]:
    return {
        str(status): {"$ref": f"#/components/responses/{operation.error}{status}"} for status in sorted(_STATUSES)
    }


def _failures(error: str) -> dict[str, Any]:
    """Return an answer of this shape for each status of the table of errors."""
    return {
        f"{error}{status}": {
            "description": f"An error: {', '.join(codes)}.",
            "headers": _headers(*_MORE_HEADERS.get(status, ())),
            "content": {_JSON: {"schema": _reference(error)}},
        }
        for status, codes in sorted(_STATUSES.items())
    }


def _headers(*more: str) -> dict[str, Any]:
    return {
        name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", "X-Octavo-Request-Id", *more)
    }


def _schemas(names: Sequence[str], model: ModelFacts) -> dict[str, Any]:
    bodies = typed_body_schemas(model_name(names), _REFERENCES)
    _, answers = msgspec.json.schema_components(ANSWER_TYPES, ref_template=_REFERENCES)
    own = body_parts() | {
        "ChatCompletionBody": chat_body(names, model),
        "TextCompletionBody": text_body(names, model),
        "TokenizeBody": tokenize_body(names, model),
        "DetokenizeBody": detokenize_body(names, model.vocab_size),
        "OpenAIError": _openai_error(),
        "AnthropicError": _anthropic_error(),
    }
    taken = bodies.keys() & answers.keys() | (bodies.keys() | answers.keys()) & own.keys()
    assert not taken, f"two schemas have one name: {taken}"
    return bodies | dict(answers) | own


def _openai_error() -> JsonSchema:
    codes = sorted({spec.http_code for spec in ERROR_TABLE if spec.http_code is not None})
    types = sorted({spec.http_type for spec in ERROR_TABLE})
    return _object(
        {
            "error": _object(
                {
                    "message": {"type": "string", "description": "What is wrong and what to do."},
                    "type": {"enum": types},
                    "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                    "code": {"enum": [*codes, None]},
                }
            )
        }
    )


def _anthropic_error() -> JsonSchema:
    error = _object({"type": {"enum": list(ERROR_TYPES)}, "message": {"type": "string"}})
    return _object({"type": {"const": "error"}, "error": error, "request_id": {"type": "string"}})


def _object(properties: Mapping[str, JsonSchema]) -> JsonSchema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REFERENCES.format(name=name)}
