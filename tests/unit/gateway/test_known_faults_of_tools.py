"""Faults of other servers with tools and forms, by the ids of the list that they come from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import orjson
import pytest
import pytest_asyncio

from libs.errors import InvalidRequest
from libs.grammar import Grammar, GrammarCompiler, GrammarForm
from libs.grammar.compiler import WHITE_SPACE
from libs.text import ModelText
from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.generation import EngineUsage, FinishReason, GenerationFinished
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.model_formats.model_format import ModelFormat
from services.gateway.model_formats.reasoning import ReasoningState
from services.gateway.openai_answers import ChatFormat
from services.gateway.openai_schema import ModelFacts, parse_chat_completion
from services.gateway.output_text import new_output
from services.gateway.parsed_output import ParsedOutput
from services.gateway.shared_prefixes import SharedPrefixes
from services.gateway.text_preparation import PreparedPrompt, TextPreparation
from tests.unit.gateway.conftest import options
from tests.unit.grammar.test_grammar_compiler import draw

MODEL = ModelFacts("tiny", 49152)


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest_asyncio.fixture
async def text(model_text: ModelText) -> AsyncIterator[TextPreparation]:
    preparation = TextPreparation(
        model_text, SharedPrefixes([], salt=b"", block_size=16), block_size=16, num_threads=1
    )
    yield preparation
    preparation.close()


async def grammar_or_error(text: TextPreparation, **fields: Any) -> Grammar | InvalidRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields
    request = parse_chat_completion(body, MODEL)
    try:
        prepared = await text.prepare(
            request.prompts, request.options, cache_salt=b"", max_model_len=8192, num_body_bytes=200
        )
    except InvalidRequest as error:
        return error
    assert prepared.grammar is not None
    return prepared.grammar


def as_form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def as_tool(schema: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


@pytest.mark.parametrize("schema", [closed(a={"type": "string", "pattern": "^ok\\!$"}), closed(a={"type": "null"})])
async def test_an_accepted_schema_is_enforced(
    schema: dict[str, Any], text: TextPreparation, model_text: ModelText
) -> None:
    """TSO-03."""
    grammar = await grammar_or_error(text, **as_form(schema))
    assert isinstance(grammar, Grammar)
    compiler = GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)

    outputs = [draw(compiler.compile(grammar), model_text, seed) for seed in range(6)]

    assert any(is_complete for _, is_complete in outputs)
    for output, is_complete in outputs:
        if is_complete:
            jsonschema.validate(json.loads(output), schema)


def test_an_unknown_form_is_refused() -> None:
    """TSO-03."""
    with pytest.raises(InvalidRequest, match="response_format"):
        parse_chat_completion(
            {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "xml"}},
            MODEL,
        )


@pytest.mark.parametrize(
    ("schema", "keyword", "place"),
    [
        (closed(a={"not": {}}), "not", "#/properties/a"),
        (closed(a=closed(b={"type": "array", "items": {"not": {}}})), "not", "#/properties/a/properties/b/items"),
        ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if", "#"),
        (closed(a={"type": "array", "uniqueItems": True}), "uniqueItems", "#/properties/a"),
        (closed(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf", "#/properties/a"),
        (closed(**{"a/b": {"type": "string", "format": "fancy"}}), "fancy", "#/properties/a~1b"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_keyword_and_place(
    schema: dict[str, Any], keyword: str, place: str, text: TextPreparation
) -> None:
    """TSO-04."""
    errors = [await grammar_or_error(text, **as_form(schema)), await grammar_or_error(text, **as_tool(schema))]

    params = []
    for error in errors:
        assert isinstance(error, InvalidRequest)
        assert repr(keyword) in error.message
        assert repr(place) in error.message
        params.append(error.param)
    assert params == ["response_format.json_schema.schema", "tools[0].function.parameters"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        closed(a={"type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2})
        | {"$defs": {"p": closed(x={"type": "integer", "maximum": 9})}},
        {"type": "object", "additionalProperties": True, "maxProperties": 1},
        closed(a={"const": "x"}),
        closed(größe={"type": "integer"}, 名={"type": "boolean"}),
        # TSO-05: both of them hold.
        closed(
            a={
                "type": "array",
                "items": {"type": "string", "maxLength": 8, "pattern": "^[a-z ]+$"},
                "minItems": 2,
                "maxItems": 2,
            }
        ),
    ],
)
async def test_what_is_accepted_is_enforced_as_a_form_and_as_a_tool(
    schema: dict[str, Any], text: TextPreparation, model_text: ModelText
) -> None:
    """TSO-04, TSO-05."""
    compiler = GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)
    grammar = await grammar_or_error(text, **as_form(schema))
    assert isinstance(grammar, Grammar)
    assert isinstance(await grammar_or_error(text, **as_tool(schema)), Grammar)

    outputs = [draw(compiler.compile(grammar), model_text, seed) for seed in range(6)]

    for output, is_complete in outputs:
        if is_complete:
            jsonschema.validate(json.loads(output), schema)


def test_white_space_between_tokens_is_bounded(model_text: ModelText) -> None:
    """TSO-06."""
    compiler = GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)
    schema = json.dumps(closed(a={"type": "integer"}, b={"type": "string"}))

    def accepts(text: str) -> bool:
        matcher = compiler.compile(Grammar(GrammarForm.JSON_SCHEMA, (schema,)))
        for token_id in model_text.tokenizer.encode(text, allow_special=False):
            matcher.accept(token_id)
        return matcher.failure is None

    assert WHITE_SPACE == r"\n?[ ]{0,16}"
    assert accepts('{\n    "a"')
    assert not accepts('{\n\n"a"')
    assert not accepts("{" + " " * 17 + '"a"')


async def test_a_tool_without_parameters_is_called_without_arguments(
    text: TextPreparation, model_text: ModelText
) -> None:
    """TSO-06."""
    tools = [{"type": "function", "function": {"name": "now"}}]
    grammar = await grammar_or_error(text, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert isinstance(grammar, Grammar)
    compiler = GrammarCompiler(model_text.tokenizer, model_text.eos_token_ids)

    output, is_complete = await asyncio.to_thread(draw, compiler.compile(grammar), model_text, 1)

    assert is_complete
    assert json.loads(calls_of(model_text, output)[0]["function"]["arguments"]) == {}


def calls_of(model_text: ModelText, text: str) -> list[dict[str, Any]]:
    """Return the calls of a streamed answer as a client puts them together."""
    token_ids = model_text.tokenizer.encode(text, allow_special=False)
    parser = ModelFormat.of(model_text).new_parser(ReasoningState.OVER, ("weather", "now"))
    assert parser is not None
    output = ParsedOutput(
        new_output(model_text.tokenizer, options(), is_continued=False), parser, shows_reasoning=True
    )
    head = AnswerHead("id", 1700000000, "tiny")
    answer = ChatFormat(head, options(), PreparedPrompt([1], []), LogprobShapes(model_text.tokenizer))
    found: dict[int, dict[str, Any]] = {}
    end = GenerationFinished(FinishReason.STOP, None, EngineUsage(0, 0, 0, 0, 0.0))
    deltas = [ChoiceDelta(0, output.take([token_id], None)) for token_id in token_ids]
    deltas.append(ChoiceDelta(0, output.take([], end)))
    for event in b"".join(map(answer.events, deltas)).split(b"\n\n")[:-1]:
        (choice,) = orjson.loads(event.removeprefix(b"data: "))["choices"]
        for part in choice["delta"].get("tool_calls", ()):
            call = found.setdefault(
                part["index"], {"id": part.get("id"), "function": {"name": "", "arguments": ""}}
            )
            call["function"]["name"] += part["function"].get("name", "")
            call["function"]["arguments"] += part["function"]["arguments"]
    whole = WholeChoice()
    for delta in deltas:
        whole.add(delta)
    body = orjson.loads(answer.body([whole], UsageCounts(1, 1, None)))
    calls: list[dict[str, Any]] = body["choices"][0]["message"]["tool_calls"]
    assert calls == [call | {"type": "function"} for _, call in sorted(found.items())]
    return calls


def test_two_calls_have_indexes_and_ids_of_their_own(model_text: ModelText) -> None:
    """TSO-08."""
    hermes = ModelFormat().tools
    assert hermes is not None
    text = hermes.call_text("weather", '{"city": "Rome"}') + "\n" + hermes.call_text("now", "{}")

    first, second = calls_of(model_text, text)

    assert first["id"] != second["id"]
    assert (first["function"], second["function"]) == (
        {"name": "weather", "arguments": '{"city": "Rome"}'},
        {"name": "now", "arguments": "{}"},
    )
