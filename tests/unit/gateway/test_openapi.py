"""The OpenAPI document against what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from libs.errors import InvalidRequest
from services.gateway.anthropic_schema import parse_messages
from services.gateway.openai_fields import CHAT_FIELDS
from services.gateway.openai_schema import ModelFacts
from services.gateway.openapi import openapi_document
from services.gateway.responses_schema import parse_response

MODEL = ModelFacts("own", 100)


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
    document = openapi_document()

    schemas = document["components"]["schemas"]
    found = set(references_in(document))
    assert found
    assert {reference.removeprefix("#/components/schemas/") for reference in found} <= schemas.keys()


def test_operations_have_ids_of_their_own() -> None:
    ids = [operation["operationId"] for path in openapi_document()["paths"].values() for operation in path.values()]

    assert len(set(ids)) == len(ids)


def test_chat_has_every_field_that_is_served() -> None:
    schema = openapi_document()["components"]["schemas"]["ChatCompletionBody"]

    assert schema["properties"].keys() == CHAT_FIELDS


def test_bounds_in_the_document_are_those_that_are_checked() -> None:
    schemas = openapi_document()["components"]["schemas"]
    highest = schemas["MessagesBody"]["properties"]["temperature"]["anyOf"][0]["maximum"]
    highest_response = schemas["ResponseBody"]["properties"]["temperature"]["anyOf"][0]["maximum"]
    message = {"model": "own", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    response = {"model": "own", "input": "x"}

    assert parse_messages(message | {"temperature": highest}, MODEL).options.temperature == highest
    assert (
        parse_response(response | {"temperature": highest_response}, MODEL).options.temperature == highest_response
    )
    with pytest.raises(InvalidRequest):
        parse_messages(message | {"temperature": highest + 0.01}, MODEL)
    with pytest.raises(InvalidRequest):
        parse_response(response | {"temperature": highest_response + 0.01}, MODEL)
