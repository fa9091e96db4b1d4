"""The OpenAPI document against what checks requests: for every bound, a value on its edge and one past it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jsonschema_rs
import pytest

from libs.errors import ERROR_TABLE, OctavoError, spec_of
from services.gateway.anthropic_schema import parse_messages, parse_token_count
from services.gateway.endpoints import TEXT
from services.gateway.openai_fields import CHAT_FIELDS, NEUTRAL_VALUES, TEXT_FIELDS
from services.gateway.openai_schema import ModelFacts, parse_chat_completion
from services.gateway.openai_text_schema import parse_text_completion
from services.gateway.openapi import openapi_document
from services.gateway.responses_schema import parse_response
from services.gateway.tokenization import parse_detokenization, parse_tokenization

MODEL = ModelFacts("own", 100)
DOCUMENT = openapi_document(["own"], MODEL)
SCHEMAS = DOCUMENT["components"]["schemas"]
PREFIX = "#/components/schemas/"
TURN = {"role": "user", "content": "x"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CONTINUED = {"messages": [{"role": "assistant", "content": "x"}], "add_generation_prompt": False}

Parse = Callable[[Mapping[str, Any], ModelFacts], Any]
PARSERS: dict[str, Parse] = {
    "ChatCompletionBody": parse_chat_completion,
    "TextCompletionBody": parse_text_completion,
    "ResponseBody": parse_response,
    "MessagesBody": parse_messages,
    "CountTokensBody": parse_token_count,
    "TokenizeBody": parse_tokenization,
    "DetokenizeBody": parse_detokenization,
}
# The least that each takes.
LEAST: dict[str, dict[str, Any]] = {
    "ChatCompletionBody": {"model": "own", "messages": [TURN]},
    "TextCompletionBody": {"model": "own", "prompt": "x"},
    "ResponseBody": {"model": "own", "input": "x"},
    "MessagesBody": {"model": "own", "max_tokens": 1, "messages": [TURN]},
    "CountTokensBody": {"model": "own", "messages": [TURN]},
    "TokenizeBody": {"messages": [TURN]},
    "DetokenizeBody": {"tokens": [1]},
}
# What a field needs beside it, as its description says.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("ChatCompletionBody", "top_logprobs"): {"logprobs": True},
    ("ChatCompletionBody", "stream_options"): {"stream": True},
    ("TextCompletionBody", "stream_options"): {"stream": True},
    ("TextCompletionBody", "max_tokens"): {"echo": True},
    ("ChatCompletionBody", "tool_choice"): {"tools": [TOOL]},
    ("ResponseBody", "tool_choice"): {"tools": [{"type": "function", "name": "f"}]},
    ("MessagesBody", "tool_choice"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("CountTokensBody", "tool_choice"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("ResponseBody", "top_logprobs"): {"include": ["message.output_text.logprobs"]},
    ("ChatCompletionBody", "continue_final_message"): CONTINUED,
    ("TokenizeBody", "continue_final_message"): CONTINUED,
}


def body_with(name: str, field: str) -> dict[str, Any]:
    """A body to which the field may be added."""
    is_text = name == "TokenizeBody" and field in ("prompt", "add_special_tokens")
    return ({"prompt": "x"} if is_text else LEAST[name]) | BESIDE.get((name, field), {})


def resolve(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].removeprefix(PREFIX)]
    return schema


def validator(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({"$ref": PREFIX + name, "components": DOCUMENT["components"]})


class Values:
    """Values of a schema: one that it takes, and those on and past its edges, which it may take or not."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def example(self, schema: dict[str, Any]) -> Any:
        schema = resolve(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        for word in ("anyOf", "oneOf"):
            if word in schema and "properties" not in schema:
                return self.example(schema[word][0])
        match kind_of(schema):
            case "object":
                properties = schema.get("properties", {})
                found = {name: self.example(properties[name]) for name in schema.get("required", ())}
                # As an assistant's message, which is nothing without its content.
                return {name: "x" for name in ("content",) if "anyOf" in schema} | found
            case "array":
                return self._several(schema.get("items", {}), schema.get("minItems", 0))
            case "string":
                # Names differ, as those of tools must.
                default = f"x{next(self._numbers)}" if "pattern" in schema else "x"
                is_json = schema.get("contentMediaType") == "application/json"
                return "{}" if is_json else default * max(1, schema.get("minLength", 1))
            case "integer" | "number":
                return schema.get("minimum", schema.get("maximum", 1))
            case "boolean":
                return True
            case _:
                return None

    def _several(self, items: dict[str, Any], count: int) -> list[Any]:
        values = [self.example(items) for _ in range(count)]
        # Equal strings may count as one.
        return [f"{index}" for index in range(count)] if values and isinstance(values[0], str) else values

    def edges(self, schema: dict[str, Any]) -> Iterator[Any]:
        schema = resolve(schema)
        for other in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            if "properties" not in schema:
                yield from self.edges(other)
        yield from (schema[word] for word in ("const", "default") if word in schema)
        yield from schema.get("enum", ())
        match kind_of(schema):
            case "integer" | "number":
                yield from self._numbers_at(schema)
            case "string":
                yield from self._strings_at(schema)
            case "array":
                yield from self._arrays_at(schema)
            case "object":
                yield from self._objects_at(schema)
        # Of other types than any that it may take.
        yield from ("no such value \x00", 2**70, {"no such": "field"}, [[[]]], 0.5, True, None)

    def _numbers_at(self, schema: dict[str, Any]) -> Iterator[Any]:
        step = 1 if kind_of(schema) == "integer" else 1e-6
        for word in ("minimum", "maximum", "exclusiveMinimum"):
            if word in schema:
                yield from (schema[word] - step, schema[word], schema[word] + step)

    def _strings_at(self, schema: dict[str, Any]) -> Iterator[Any]:
        for word in ("minLength", "maxLength"):
            if word in schema:
                yield from ("x" * (schema[word] + more) for more in (-1, 0, 1) if schema[word] + more >= 0)
        if "pattern" in schema:
            yield from ("", "x", "x" * 64, "x" * 65, "no good", "é")

    def _arrays_at(self, schema: dict[str, Any]) -> Iterator[Any]:
        items = schema.get("items", {})
        for word in ("minItems", "maxItems"):
            if word in schema:
                sizes = [schema[word] + more for more in (-1, 0, 1) if schema[word] + more >= 0]
                yield from (self._several(items, size) for size in sizes)
        yield from ([value] for value in self.edges(items))

    def _objects_at(self, schema: dict[str, Any]) -> Iterator[Any]:
        least = self.example(schema)
        for name, of_value in schema.get("properties", {}).items():
            yield from (least | {name: value} for value in self.edges(of_value))
        for name in schema.get("required", ()):
            yield {other: value for other, value in least.items() if other != name}
        yield least | {"no such field": 1}
        of_value = schema.get("additionalProperties")
        if isinstance(of_value, dict):
            sizes = [schema["maxProperties"], schema["maxProperties"] + 1]
            yield from ({str(key): self.example(of_value) for key in range(size)} for size in sizes)
            yield from ({"1": value} for value in self.edges(of_value))
            keys = schema["propertyNames"]
            yield from ({key: self.example(of_value)} for key in self._strings_at(keys))


def kind_of(schema: dict[str, Any]) -> str | None:
    kind = schema.get("type")
    return kind[0] if isinstance(kind, list) else kind


def is_taken(name: str, body: dict[str, Any]) -> bool:
    try:
        parsed(name, body)
    except OctavoError as error:
        status = spec_of(error).http_status
        assert status < 500, "refused, and no fault of ours"
        return False
    return True


def fields() -> list[tuple[str, str]]:
    found = []
    for name in PARSERS:
        schema = SCHEMAS[name]
        variants = [schema] if "properties" in schema else schema["anyOf"]
        found += sorted({(name, field) for variant in variants for field in variant["properties"]})
    return found


def schemas_of(name: str, field: str) -> list[dict[str, Any]]:
    schema = SCHEMAS[name]
    variants = [schema] if "properties" in schema else schema["anyOf"]
    return [variant["properties"][field] for variant in variants if field in variant["properties"]]


def is_told_in_words(name: str, field: str, value: Any) -> bool:
    """Whether a schema takes a value that its description rules out."""
    text = json.dumps(value)
    match field:
        case "logit_bias":
            return isinstance(value, dict) and any(int(key) >= MODEL.vocab_size for key in value)
        case "structured_outputs":
            return isinstance(value, dict) and isinstance(value.get("json"), str)
        case "tool_choice":
            # It names one of the tools.
            return '"name": ' in text and '"name": "f"' not in text
        case "messages":
            # Calls and their results have their places.
            if name in ("MessagesBody", "CountTokensBody"):
                return '"tool_' in text or '"thinking"' in text
            return '"role": "tool"' in text
        case "input":
            # Arguments are a JSON object, and results answer calls.
            return '"function_call' in text
        case "thinking" | "reasoning":
            # This model does not reason.
            return isinstance(value, dict) and not (
                value.get("type") == "disabled" or value.get("effort") == "none"
            )
    return False


@pytest.mark.parametrize(("name", "field"), fields())
def test_a_field_is_taken_where_the_document_says_so_and_refused_elsewhere(name: str, field: str) -> None:
    check = validator(name)
    num_valid = 0
    for schema in schemas_of(name, field):
        for value in Values().edges(schema):
            body = body_with(name, field) | {field: value}
            is_valid = check.is_valid(body)
            num_valid += is_valid
            if is_valid and is_told_in_words(name, field, value):
                continue
            assert is_taken(name, body) == is_valid, shown(value)

    assert num_valid


def shown(value: Any) -> str:
    return json.dumps(value)[:300]


@pytest.mark.parametrize("name", PARSERS)
def test_a_body_needs_what_is_required_and_takes_nothing_unknown(name: str) -> None:
    check = validator(name)
    least = LEAST[name]

    assert check.is_valid(least)
    assert is_taken(name, least)
    for field in least:
        body = {other: value for other, value in least.items() if other != field}
        assert not check.is_valid(body), field
        assert not is_taken(name, body), field
    assert not check.is_valid(least | {"no such field": 1})
    assert not is_taken(name, least | {"no such field": 1})


@pytest.mark.parametrize(("name", "field"), fields())
def test_a_default_is_what_happens_without_the_field(name: str, field: str) -> None:
    for schema in schemas_of(name, field):
        if "default" not in schema:
            continue
        without = {other: value for other, value in body_with(name, field).items() if other != field}
        without |= {"add_generation_prompt": None} if field == "continue_final_message" else {}

        with_default = parsed(name, without | {field: schema["default"]})

        if (name, field) == ("TextCompletionBody", "max_tokens"):
            # The endpoint's limit of requests that name none.
            assert TEXT.default_max_tokens == schema["default"]
        else:
            assert with_default == parsed(name, without)


def parsed(name: str, body: dict[str, Any]) -> Any:
    return PARSERS[name](body, MODEL)


def test_every_field_is_described() -> None:
    missing = [
        (name, field)
        for name, field in fields()
        for schema in schemas_of(name, field)
        if not schema.get("description") and not resolve(schema).get("description")
    ]

    assert not missing


def test_bodies_have_every_field_that_is_served_or_known() -> None:
    assert SCHEMAS["ChatCompletionBody"]["properties"].keys() == CHAT_FIELDS | NEUTRAL_VALUES.keys()
    assert SCHEMAS["TextCompletionBody"]["properties"].keys() == TEXT_FIELDS | NEUTRAL_VALUES.keys()


def references_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from references_in(each)


def test_every_reference_leads_somewhere() -> None:
    found = set(references_in(DOCUMENT))

    assert found
    for reference in found:
        _, kind, name = reference.removeprefix("#/").split("/")
        assert name in DOCUMENT["components"][kind], reference


def test_schemas_are_json_schemas() -> None:
    for schema in SCHEMAS.values():
        jsonschema_rs.meta.validate(schema)


def test_operations_have_ids_of_their_own() -> None:
    ids = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]

    assert len(set(ids)) == len(ids)


def test_every_status_of_the_table_of_errors_is_documented() -> None:
    statuses = {str(spec.http_status) for spec in ERROR_TABLE}

    for path in DOCUMENT["paths"].values():
        for operation in path.values():
            assert operation["responses"].keys() == statuses | {"200"}
