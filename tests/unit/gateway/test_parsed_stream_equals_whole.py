"""However an answer with reasoning and calls is cut into steps, each API's stream is its whole answer."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.text import ModelText, load_model_text
from services.gateway.answer_format import AnswerFormat, AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.anthropic_answers import MessageFormat
from services.gateway.generation import EngineUsage, FinishReason, GenerationFinished, TokenLogprob
from services.gateway.generation_options import GenerationOptions
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.model_formats.model_format import ModelFormat
from services.gateway.model_formats.reasoning import ReasoningState
from services.gateway.openai_answers import ChatFormat
from services.gateway.openai_schema import ModelFacts
from services.gateway.output_text import new_output
from services.gateway.parsed_output import ParsedOutput
from services.gateway.partial_json import complete_object
from services.gateway.responses_answers import ResponseFormat
from services.gateway.responses_schema import parse_response
from services.gateway.text_preparation import PreparedPrompt
from tests.fakes.model_folders import write_model_folder
from tests.unit.gateway.conftest import options

HEAD = AnswerHead("resp_1", 1700000000, "tiny")
PROMPT = PreparedPrompt([1, 5, 6], [])
NO_USAGE = EngineUsage(0, 0, 0, 0, 0.0)
COUNTS = UsageCounts(1, 1, None)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro</tool_call>\\"🦜"}}\n</tool_call>'
TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<tool_call>", CALL, CALL[:40], "Hi", " \n", "é🦜", "<", '{"a": 1}']),
    max_size=6,
).map("".join)


@functools.cache
def model() -> tuple[ModelText, ModelFormat]:
    with tempfile.TemporaryDirectory() as folder:
        model_text = load_model_text(write_model_folder(Path(folder), "qwen3"))
    return model_text, ModelFormat.of(model_text)


def deltas_of(steps: Sequence[Sequence[int]], state: ReasoningState, reason: FinishReason) -> list[ChoiceDelta]:
    model_text, model_format = model()
    parser = model_format.new_parser(state, ("weather",))
    assert parser is not None
    asked: GenerationOptions = options()
    output = ParsedOutput(new_output(model_text.tokenizer, asked, is_continued=False), parser, shows_reasoning=True)
    found = []
    for number, step in enumerate(steps):
        end = GenerationFinished(reason, None, NO_USAGE) if number == len(steps) - 1 else None
        logprobs = [TokenLogprob(-token_id / 16, 1, ()) for token_id in step]
        found.append(ChoiceDelta(0, output.take(step, end), logprobs))
    return found


def whole_of(answer: AnswerFormat, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
    choice = WholeChoice()
    for delta in deltas:
        choice.add(delta)
    body: dict[str, Any] = orjson.loads(answer.body([choice], COUNTS))
    return body


def events_of(answer: AnswerFormat, deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    data = b"".join(map(answer.events, deltas)) + answer.usage_event(COUNTS)
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]


def chat_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream together as OpenAI's clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({name: part[name] for name in ("id", "type", "function")})
                else:
                    message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put a stream together as Anthropic's client does."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                delta = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                key = name[delta["type"]]
                blocks[event["index"]]["json" if key == "partial_json" else key] += delta[key]
            case _:
                pass
    return blocks


def without_input(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name not in ("input", "json")}


def items_of(response: dict[str, Any], *, with_logprobs: bool) -> list[dict[str, Any]]:
    """A response's items in their order, but for how they ended."""
    items = [item | {"status": None} for item in copy.deepcopy(response["output"])]
    for part in chain.from_iterable(item.get("content", ()) for item in items):
        if not with_logprobs:
            part.pop("logprobs", None)
    return items


@settings(max_examples=80)
@given(
    data=st.data(),
    text=TEXTS,
    state=st.sampled_from(ReasoningState),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_streams_with_reasoning_and_calls_are_the_whole_answer(
    data: st.DataObject, text: str, state: ReasoningState, reason: FinishReason
) -> None:
    model_text, _ = model()
    token_ids = model_text.tokenizer.encode(text, allow_special=True)
    places = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=8)))
    steps = [token_ids[start:end] for start, end in zip([0, *places], [*places, len(token_ids)], strict=True)]
    streamed, at_once = deltas_of(steps, state, reason), deltas_of([token_ids], state, reason)
    shapes = LogprobShapes(model_text.tokenizer)
    request = parse_response(
        {"model": "tiny", "input": "Hi", "include": ["message.output_text.logprobs"]}, ModelFacts("tiny", 49152)
    )

    chat = whole_of(ChatFormat(HEAD, options(), PROMPT, shapes), at_once)["choices"][0]
    message = chat_message(events_of(ChatFormat(HEAD, options(), PROMPT, shapes), streamed)[:-1])
    blocks = blocks_of(events_of(MessageFormat(HEAD, PROMPT), streamed))
    content = whole_of(MessageFormat(HEAD, PROMPT), at_once)["content"]
    response = whole_of(ResponseFormat(HEAD, request.body, shapes), at_once)
    events = events_of(ResponseFormat(HEAD, request.body, shapes), streamed)

    assert streamed[-1].content.num_reasoning_tokens == at_once[-1].content.num_reasoning_tokens
    assert message["content"] == (chat["message"]["content"] or "")
    assert message["reasoning_content"] == chat["message"].get("reasoning_content", "")
    assert message["tool_calls"] == chat["message"].get("tool_calls", [])
    assert message["finish_reason"] == chat["finish_reason"]
    assert [without_input(block) for block in blocks] == [without_input(block) for block in content]
    calls = [json.loads(complete_object(one["json"])) for one in blocks if one["type"] == "tool_use"]
    assert calls == [one["input"] for one in content if one["type"] == "tool_use"]
    last = events[-1]["response"]
    # With which of several messages a token comes is known to a step, not to a token.
    is_alone = all(item["type"] != "function_call" for item in response["output"])
    assert items_of(last, with_logprobs=is_alone) == items_of(response, with_logprobs=is_alone)
    texts = [part["text"] for x in last["output"] if x["type"] == "message" for part in x["content"]]
    assert "".join(texts) == message["content"]
    assert len({item["id"] for item in last["output"]}) == len(last["output"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == last["output"]


@settings(max_examples=60)
@given(
    value=st.dictionaries(
        st.text(max_size=3),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=5,
        ),
        max_size=3,
    ),
    data=st.data(),
)
def test_the_beginning_of_an_object_is_closed_to_what_of_it_is_certain(
    value: dict[str, Any], data: st.DataObject
) -> None:
    text = orjson.dumps(value).decode()
    cut = data.draw(st.integers(0, len(text)))

    found = json.loads(complete_object(text[:cut]))

    assert complete_object(text) == text
    assert found.keys() <= value.keys()
    for key in list(found)[:-1]:
        assert found[key] == value[key]
