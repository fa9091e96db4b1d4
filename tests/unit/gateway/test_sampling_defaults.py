"""A model's own sampling where a request says nothing.

Servers that ignored generation_config.json answered with other settings than the authors recommend, unnoticed:
Blaizzy/mlx-vlm#1331, osaurus-ai/osaurus#932, NVIDIA/TensorRT-LLM#17213. vLLM applies it unasked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from libs.errors import ModelLoadFailed
from services.gateway.anthropic_schema import parse_messages
from services.gateway.generation_options import GenerationOptions
from services.gateway.openai_schema import ModelFacts, parse_chat_completion
from services.gateway.openai_text_schema import parse_text_completion
from services.gateway.openapi import openapi_document
from services.gateway.responses_schema import parse_response
from services.gateway.sampling_defaults import checked_sampling_defaults

# Those of Qwen2.5-7B-Instruct, and one more.
OWN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
MODEL = ModelFacts("own", 1000, sampling_defaults=OWN)
TURNS = [{"role": "user", "content": "Hi"}]

Parse = Callable[[Mapping[str, Any], ModelFacts], Any]
ENDPOINTS: dict[str, tuple[Parse, dict[str, Any]]] = {
    "chat": (parse_chat_completion, {"model": "own", "messages": TURNS}),
    "text": (parse_text_completion, {"model": "own", "prompt": "Hi"}),
    "responses": (parse_response, {"model": "own", "input": "Hi"}),
    "messages": (parse_messages, {"model": "own", "messages": TURNS, "max_tokens": 5}),
}


def sampling_of(options: GenerationOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in OWN}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_a_request_leaves_out_is_the_models(endpoint: str) -> None:
    parse, body = ENDPOINTS[endpoint]

    left_out = parse(body, MODEL)
    null = parse({**body, "temperature": None, "top_p": None}, MODEL)

    assert sampling_of(left_out.options) == sampling_of(null.options) == OWN


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_a_request_says_wins(endpoint: str) -> None:
    parse, body = ENDPOINTS[endpoint]

    options = parse({**body, "temperature": 0, "top_p": 1}, MODEL).options

    assert sampling_of(options) == OWN | {"temperature": 0.0, "top_p": None}


def test_neutral_values_of_a_request_win_too() -> None:
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

    options = parse_chat_completion(ENDPOINTS["chat"][1] | neutral, MODEL).options

    assert sampling_of(options) == {
        "temperature": 1.0,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "repetition_penalty": None,
    }


def test_a_response_repeats_what_was_used() -> None:
    parse, body = ENDPOINTS["responses"]

    response = parse(body, MODEL)

    assert (response.body.temperature, response.body.top_p) == (0.7, 0.8)


def test_the_description_of_the_api_has_them_as_defaults() -> None:
    schemas = openapi_document(["own"], MODEL)["components"]["schemas"]

    for name in ("ChatCompletionBody", "TextCompletionBody"):
        properties = schemas[name]["properties"]
        assert {key: properties[key]["default"] for key in OWN} == OWN


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 5},
        {"temperature": "0.7"},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": 2.5},
        {"min_p": -1},
        {"repetition_penalty": 0},
        {"repetition_penalty": True},
    ],
    ids=repr,
)
def test_what_no_request_could_say_is_refused_with_a_way_out(values: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadFailed, match=f"'{next(iter(values))}' .*generation_config to none"):
        checked_sampling_defaults(values, vocab_size=1000)


def test_a_top_k_of_more_than_the_vocabulary_keeps_all() -> None:
    assert checked_sampling_defaults({"top_k": 5000, "top_p": 0.5}, vocab_size=1000) == {
        "top_k": 1000,
        "top_p": 0.5,
    }
