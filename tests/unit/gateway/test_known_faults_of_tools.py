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

from libs.errors import InvalidRequest, UnsupportedField
from libs.grammar import Grammar, GrammarCompiler, GrammarForm
from libs.grammar.compiler import WHITE_SPACE
from libs.text import ChatMessage, ModelText
from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeCall, WholeChoice
from services.gateway.anthropic_answers import MessageFormat
from services.gateway.anthropic_schema import parse_messages
from services.gateway.generation import EngineUsage, FinishReason, GenerationFinished
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.model_formats.model_format import ModelFormat
from services.gateway.model_formats.reasoning import ReasoningState
from services.gateway.openai_answers import ChatFormat
from services.gateway.openai_schema import ModelFacts, parse_chat_completion
from services.gateway.output_text import new_output
from services.gateway.parsed_output import ParsedOutput
from services.gateway.responses_answers import ResponseFormat
from services.gateway.responses_schema import parse_response
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


async def test_a_form_beside_tools_that_cannot_be_enforced_is_named(text: TextPreparation) -> None:
    error = await grammar_or_error(text, **as_form(closed(a={"not": {}})), tools=as_tool(closed())["tools"])

    assert isinstance(error, InvalidRequest)
    assert error.param == "response_format.json_schema.schema"


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


DEEP = '{"a":' * 900 + "1" + "}" * 900


def turns_with(call: dict[str, Any], result: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """A conversation with a call of a tool and its result."""
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"} | (result or {}),
    ]


def parsed_turns(messages: list[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    return parse_chat_completion({"model": "tiny", "messages": messages}, MODEL).prompt.messages


@pytest.mark.parametrize(
    ("arguments", "read"),
    # microsoft/vscode-copilot-chat#1560, vortico/flama#258.
    [("", "{}"), (" \n", "{}"), ({"city": "Rom"}, '{"city":"Rom"}'), ('{"a":1e99}', '{"a":1e99}')],
)
def test_arguments_are_read_as_clients_send_them(arguments: Any, read: str) -> None:
    messages = parsed_turns(turns_with({"name": "f", "arguments": arguments}))

    assert messages[1].tool_calls[0].arguments == read


@pytest.mark.parametrize(
    "arguments", ["[]", '"x"', '{"a"', '{"a":NaN}', None, 5, [], '{"a":' * 900 + "1" + "}" * 900]
)
def test_arguments_that_no_template_takes_are_refused(arguments: Any) -> None:
    """sgl-project/sglang#28035; those nested deep answered 500."""
    with pytest.raises(InvalidRequest, match="arguments"):
        parsed_turns(turns_with({"name": "f", "arguments": arguments}))


def test_inputs_of_anthropics_calls_nested_deep_are_refused() -> None:
    value: dict[str, Any] = {}
    for _ in range(600):
        value = {"a": value}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": value}
    result = {"type": "tool_result", "tool_use_id": "t"}
    body = {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
    }

    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].input"):
        parse_messages(body, MODEL)


def test_a_result_may_name_its_function() -> None:
    """As OpenAI's own examples have it."""
    messages = parsed_turns(turns_with({"name": "f", "arguments": "{}"}, {"name": "f"}))

    assert (messages[2].name, messages[2].content) == ("f", "ok")


def test_an_answer_that_was_cut_in_its_reasoning_may_be_sent_back() -> None:
    thought = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "Hm"}
    user = {"role": "user", "content": "Hi"}

    messages = parsed_turns([user, thought, user])

    assert (messages[1].content, messages[1].reasoning) == ("", "Hm")


def test_a_response_with_text_behind_a_call_may_be_sent_back() -> None:
    """Text between a call and its result was a turn of its own, which templates refuse."""
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": ""}
        | {"namespace": None, "caller": None, "async": None},
        {"role": "assistant", "content": "One moment."},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        {"role": "assistant", "content": "Done."},
    ]

    messages = parse_response({"model": "tiny", "input": items}, MODEL).prompt.messages

    assert [(one.role, one.content) for one in messages] == [
        ("user", "Hi"),
        ("assistant", "I look.\nOne moment."),
        ("tool", "ok"),
        ("assistant", "Done."),
    ]
    assert (messages[1].reasoning, messages[1].tool_calls[0].arguments) == ("Hm", "{}")


def test_a_key_of_the_prompts_cache_is_taken() -> None:
    """Agents send it with each request; prefixes are kept and found again unasked."""
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}

    parse_chat_completion(chat | {"prompt_cache_key": "thread-1"}, MODEL)
    parse_response({"model": "tiny", "input": "Hi", "prompt_cache_key": "thread-1"}, MODEL)

    with pytest.raises(UnsupportedField, match="prompt_cache_key"):
        parse_chat_completion(chat | {"prompt_cache_key": 5}, MODEL)


def test_what_agents_say_of_anthropics_tools_and_texts_is_taken() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "eager_input_streaming": True}
    text = {"type": "text", "text": "Hi", "citations": []}
    body = {"model": "tiny", "max_tokens": 9, "tools": [tool], "messages": [{"role": "user", "content": [text]}]}

    assert parse_messages(body, MODEL).prompt.messages[0].content == "Hi"


def test_an_empty_list_of_anthropics_system_blocks_is_none() -> None:
    body = {"model": "tiny", "max_tokens": 9, "system": [], "messages": [{"role": "user", "content": "Hi"}]}

    assert [message.role for message in parse_messages(body, MODEL).prompt.messages] == ["user"]


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ('{"a": 123456789012345678901234567890, "b": "\\ud83d"}', None),
        ('{"a": 1e400}', None),
        ('{"a": 12345678901234567890123, "b": "x', '{"a": 12345678901234567890123}'),
        ('{"a": NaN}', "{}"),
        ('{"a":' * 600 + "1" + "}" * 600, None),
    ],
)
def test_inputs_of_whole_messages_are_what_was_written(written: str, given: str | None) -> None:
    """What a stream gives as text was read and written anew here, which lost digits, or all of it."""
    message = MessageFormat(AnswerHead("msg_1", 1700000000, "tiny"), PreparedPrompt([1], []))
    choice = WholeChoice(calls=[WholeCall("f", 0, 0, written)], finish_reason=FinishReason.STOP)

    body = message.body([choice], UsageCounts(1, 1, None))

    assert b'"input":' + (given or written).encode() + b"}" in body


def test_a_response_repeats_integers_of_any_size(model_text: ModelText) -> None:
    """A tool's default of more than 64 bits answered 500."""
    big = 123456789012345678901234567890
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "default": {"a": big}}}
    request = parse_response({"model": "tiny", "input": "Hi", "tools": [tool]}, MODEL)
    head = AnswerHead("resp_1", 1700000000, "tiny")
    answer = ResponseFormat(head, request.body, LogprobShapes(model_text.tokenizer))
    choice = WholeChoice(pieces=["Hello"], finish_reason=FinishReason.STOP)

    body = json.loads(answer.body([choice], UsageCounts(1, 1, None)))

    assert body["tools"][0]["parameters"]["default"]["a"] == big


def test_inputs_of_earlier_calls_keep_integers_of_any_size() -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 123456789012345678901234567890}}
    result = {"type": "tool_result", "tool_use_id": "t"}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]

    prompt = parse_messages({"model": "tiny", "max_tokens": 9, "messages": turns}, MODEL).prompt

    assert prompt.messages[0].tool_calls[0].arguments == '{"a":123456789012345678901234567890}'
