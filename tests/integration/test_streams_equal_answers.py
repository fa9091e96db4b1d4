"""However an engine cuts its tokens into steps, a stream put together is the whole answer: in every dialect.

Random outputs go through a real gateway process, once as a stream and once as a whole, each time in other steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.partial_json import complete_object
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import Stand
from tests.integration.http_answers import CHAT, QUESTION, TEXT, post

pytestmark = pytest.mark.asyncio(loop_scope="session")

EOS, CONTROL = 2, 1
STOP, LENGTH = 1, 2  # FinishReason on the wire
VOCAB_SIZE = 49_152
# Emoji joined by others, accents that combine, letters of two and three bytes, and parts of the stop strings.
CHARACTERS = "ab<|E> \n😀👩\u200d👩e\u0301éßक\u093f漢🦜"
STOP_STRINGS = ["ab", "<|E|>", "😀", "e\u0301", "\n\n", "E>a"]
BOUNDED = settings(max_examples=40)
THOROUGH = settings(max_examples=800)


class Output(NamedTuple):
    """What an engine says of one choice."""

    token_ids: list[int]
    ends_with_stop_token: bool
    reason: int


@st.composite
def outputs(draw: st.DrawFn, encode: Any) -> Output:
    """Text that a tokenizer wrote, tokens that are any bytes, and control tokens, in any order."""
    piece = st.text(alphabet=CHARACTERS, min_size=1, max_size=8).map(encode)
    anything = st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=3)
    pieces = draw(st.lists(piece | anything | st.just([CONTROL]), max_size=6))
    token_ids = [*chain.from_iterable(pieces)]
    is_stopped = draw(st.booleans())
    return Output([*token_ids, EOS] if is_stopped else token_ids, is_stopped, STOP if is_stopped else LENGTH)


@st.composite
def tool_outputs(draw: st.DrawFn, encode: Any) -> Output:
    """Calls with arguments of any text, and text around them; cut anywhere."""
    text = st.text(alphabet=CHARACTERS + '"\\{}', max_size=12)
    parts = [draw(st.sampled_from(["", "Let me see. ", "😀\n"]))]
    for _ in range(draw(st.integers(0, 3))):
        arguments = json.dumps({"text": draw(text), "n": [draw(st.integers())]}, ensure_ascii=draw(st.booleans()))
        parts.append(f'<tool_call>\n{{"name": "note", "arguments": {arguments}}}\n</tool_call>')
        parts.append(draw(st.sampled_from(["", "And then: ", "é"])))
    written = "\n".join(parts)
    cut = draw(st.integers(0, len(written)) | st.just(len(written)))
    is_stopped = cut == len(written)
    token_ids = encode(written[:cut])
    return Output([*token_ids, EOS] if is_stopped else token_ids, is_stopped, STOP if is_stopped else LENGTH)


def script_of(made: Sequence[Output], sizes: Sequence[Sequence[int]], num_cached: int = 0) -> Script:
    """Say these outputs, one for each choice, in steps of these sizes."""
    first, *others = [
        Script(
            token_ids=output.token_ids,
            step_sizes=steps,
            tokens_per_step=3,
            ends_with_stop_token=output.ends_with_stop_token,
            reason=output.reason,
            num_cached_tokens=num_cached,
        )
        for output, steps in zip(made, sizes, strict=True)
    ]
    return Script(**{name: getattr(first, name) for name in first.__slots__} | {"other_choices": others})


STEP_SIZES = st.lists(st.integers(1, 9), max_size=12)


class Case(NamedTuple):
    """The same outputs in two ways to cut them."""

    streamed: Script
    whole: Script


@st.composite
def cases(draw: st.DrawFn, strategy: st.SearchStrategy[Output], num_choices: int) -> Case:
    made = [draw(strategy) for _ in range(num_choices)]
    ways = [[draw(STEP_SIZES) for _ in made] for _ in range(2)]
    num_cached = draw(st.sampled_from([0, 16]))
    return Case(*(script_of(made, sizes, num_cached) for sizes in ways))


async def both_ways(stand: Stand, path: str, fields: dict[str, Any], case: Case, streaming: dict[str, Any]) -> Any:
    """Ask twice; returns the events of the stream and the whole body."""
    stand.engine.scripts.clear()
    stand.engine.scripts.append(case.streamed)
    stream = await post(stand, path, fields | streaming)
    stand.engine.scripts.append(case.whole)
    whole = await post(stand, path, fields)
    assert (stream.status, whole.status) == (200, 200), (stream.raw, whole.raw)
    return stream, whole.json


OPENAI_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def choices_of(events: Sequence[Any]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


@st.composite
def openai_fields(draw: st.DrawFn, *, is_chat: bool) -> dict[str, Any]:
    count = draw(st.none() | st.integers(0, 2))
    fields: dict[str, Any] = {
        "n": draw(st.integers(1, 3)),
        "stop": draw(st.lists(st.sampled_from(STOP_STRINGS), max_size=2, unique=True)),
        "min_tokens": draw(st.integers(0, 3)),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "return_token_ids": draw(st.booleans()),
        "echo": draw(st.booleans()),
        "max_tokens": draw(st.sampled_from([3, 100])),
    }
    if count is not None:
        fields |= {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}
    return fields


def assert_chat_is_whole(events: Sequence[Any], whole: dict[str, Any]) -> None:
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == whole["usage"]
    streamed = choices_of(events[:-1])
    assert len(streamed) == len(whole["choices"])
    for choice in whole["choices"]:
        parts = streamed[choice["index"]]
        assert [part["delta"]["role"] for part in parts if "role" in part["delta"]] == ["assistant"]
        content = "".join(part["delta"].get("content") or "" for part in parts)
        assert content == (choice["message"]["content"] or "")
        assert calls_of(parts) == [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in choice["message"].get("tool_calls", ())
        ]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert [*chain.from_iterable(part.get("token_ids") or () for part in parts)] == choice.get("token_ids", [])
        entries = [*chain.from_iterable(part["logprobs"]["content"] for part in parts if part["logprobs"])]
        assert entries == (choice["logprobs"] or {"content": []})["content"]


def calls_of(parts: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    found: dict[int, list[str]] = {}
    for delta in chain.from_iterable(part["delta"].get("tool_calls") or () for part in parts):
        function = delta["function"]
        if delta["index"] not in found:
            found[delta["index"]] = [delta["id"], function["name"], ""]
        found[delta["index"]][2] += function["arguments"]
    return [(call[0], call[1], call[2]) for _, call in sorted(found.items())]


async def check_chat(stand: Stand, data: st.DataObject) -> None:
    fields = data.draw(openai_fields(is_chat=True))
    messages = [*QUESTION, {"role": "assistant", "content": "Sure: "}]
    case = data.draw(cases(outputs(stand.encode), fields["n"]))

    stream, whole = await both_ways(stand, CHAT, {"messages": messages} | fields, case, OPENAI_STREAM)

    assert_chat_is_whole(stream.events, whole)


@BOUNDED
@given(data=st.data())
async def test_a_chat(fault_stand: Stand, data: st.DataObject) -> None:
    await check_chat(fault_stand, data)


@pytest.mark.slow
@THOROUGH
@given(data=st.data())
async def test_many_chats(fault_stand: Stand, data: st.DataObject) -> None:
    await check_chat(fault_stand, data)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "note", "parameters": {"type": "object", "additionalProperties": True}},
    }
]


async def check_chat_with_calls(stand: Stand, data: st.DataObject) -> None:
    num_choices = data.draw(st.integers(1, 2))
    fields = {"messages": QUESTION, "tools": TOOLS, "n": num_choices, "max_tokens": 2000}
    case = data.draw(cases(tool_outputs(stand.encode), num_choices))

    stream, whole = await both_ways(stand, CHAT, fields, case, OPENAI_STREAM)

    # An id follows from the answer's, so calls are compared by their place.
    for choice in whole["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            call["id"] = ""
    events = stream.events
    for part in chain.from_iterable(event["choices"] for event in events[:-1]):
        for call in part["delta"].get("tool_calls") or ():
            assert call.pop("id", "call_").startswith("call_")
            call["id"] = ""
    assert_chat_is_whole(events, whole)


@BOUNDED
@given(data=st.data())
async def test_a_chat_with_calls(fault_stand: Stand, data: st.DataObject) -> None:
    await check_chat_with_calls(fault_stand, data)


@pytest.mark.slow
@THOROUGH
@given(data=st.data())
async def test_many_chats_with_calls(fault_stand: Stand, data: st.DataObject) -> None:
    await check_chat_with_calls(fault_stand, data)


async def check_text(stand: Stand, data: st.DataObject) -> None:
    fields = data.draw(openai_fields(is_chat=False))
    case = data.draw(cases(outputs(stand.encode), fields["n"]))

    stream, whole = await both_ways(stand, TEXT, {"prompt": "A 😀 "} | fields, case, OPENAI_STREAM)

    events = stream.events
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == whole["usage"]
    streamed = choices_of(events[:-1])
    assert len(streamed) == len(whole["choices"])
    for choice in whole["choices"]:
        parts = streamed[choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert [*chain.from_iterable(part.get("token_ids") or () for part in parts)] == choice.get("token_ids", [])
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            values = [*chain.from_iterable(part["logprobs"][name] for part in parts if part["logprobs"])]
            assert values == (choice["logprobs"] or {name: []})[name]


@BOUNDED
@given(data=st.data())
async def test_a_completion(fault_stand: Stand, data: st.DataObject) -> None:
    await check_text(fault_stand, data)


@pytest.mark.slow
@THOROUGH
@given(data=st.data())
async def test_many_completions(fault_stand: Stand, data: st.DataObject) -> None:
    await check_text(fault_stand, data)


def named_events(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream that names them."""
    found = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        if block == ": ping":
            continue
        name, _, payload = block.partition("\ndata: ")
        event: dict[str, Any] = json.loads(payload)
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


@BOUNDED
@given(data=st.data())
async def test_a_response(fault_stand: Stand, data: st.DataObject) -> None:
    case = data.draw(cases(outputs(fault_stand.encode), 1))
    fields = {"input": "Say hi.", "max_output_tokens": data.draw(st.sampled_from([3, 100]))}

    stream, whole = await both_ways(fault_stand, "/v1/responses", fields, case, {"stream": True})

    events = named_events(stream.raw)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    pieces = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    (item,) = whole["output"]
    assert pieces == "".join(part["text"] for part in item["content"])
    for name in ("status", "usage", "incomplete_details"):
        assert last[name] == whole[name]
    assert [part["text"] for part in last["output"][0]["content"]] == [part["text"] for part in item["content"]]


@BOUNDED
@given(data=st.data())
async def test_a_message(fault_stand: Stand, data: st.DataObject) -> None:
    case = data.draw(cases(outputs(fault_stand.encode), 1))
    stops = data.draw(st.lists(st.sampled_from(STOP_STRINGS), max_size=3, unique=True))
    fields = {"messages": QUESTION, "max_tokens": data.draw(st.sampled_from([3, 100])), "stop_sequences": stops}

    stream, whole = await both_ways(fault_stand, "/v1/messages", fields, case, {"stream": True})

    events = [event for event in named_events(stream.raw) if event["type"] != "ping"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    (last,) = [event for event in events if event["type"] == "message_delta"]
    assert text == "".join(block["text"] for block in whole["content"])
    assert last["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[-1]["type"] == "message_stop"


RESPONSE_TOOLS = [{"type": "function", "name": "note", "parameters": {"type": "object"}, "strict": False}]
MESSAGE_TOOLS = [{"name": "note", "input_schema": {"type": "object"}}]


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ids are made from differs between two answers."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


async def check_response_with_calls(stand: Stand, data: st.DataObject) -> None:
    case = data.draw(cases(tool_outputs(stand.encode), 1))
    fields = {"input": "Say hi.", "max_output_tokens": 2000, "tools": RESPONSE_TOOLS}

    stream, whole = await both_ways(stand, "/v1/responses", fields, case, {"stream": True})

    events = named_events(stream.raw)
    last = events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert {name: last[name] for name in ("status", "usage")} == {name: whole[name] for name in ("status", "usage")}
    arguments: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            arguments[event["item_id"]] = arguments.get(event["item_id"], "") + event["delta"]
    written = {item["id"]: item["arguments"] for item in last["output"] if item["type"] == "function_call"}
    assert {item_id: text for item_id, text in written.items() if text} == arguments


@BOUNDED
@given(data=st.data())
async def test_a_response_with_calls(fault_stand: Stand, data: st.DataObject) -> None:
    await check_response_with_calls(fault_stand, data)


@pytest.mark.slow
@THOROUGH
@given(data=st.data())
async def test_many_responses_with_calls(fault_stand: Stand, data: st.DataObject) -> None:
    await check_response_with_calls(fault_stand, data)


async def check_message_with_calls(stand: Stand, data: st.DataObject) -> None:
    case = data.draw(cases(tool_outputs(stand.encode), 1))
    fields = {"messages": QUESTION, "max_tokens": 2000, "tools": MESSAGE_TOOLS}

    stream, whole = await both_ways(stand, "/v1/messages", fields, case, {"stream": True})

    blocks: list[dict[str, Any]] = []
    for event in named_events(stream.raw):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]) | {"written": ""})
        elif event["type"] == "content_block_delta":
            blocks[event["index"]]["written"] += event["delta"].get("text", "") + event["delta"].get(
                "partial_json", ""
            )
        elif event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] == whole["stop_reason"]
            assert event["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]
    for streamed, block in zip(blocks, whole["content"], strict=True):
        if block["type"] == "text":
            assert streamed["written"] == block["text"]
        else:
            # A call that was cut is told as it came in a stream, and as an object in a whole answer.
            assert json.loads(complete_object(streamed["written"])) == block["input"]


@BOUNDED
@given(data=st.data())
async def test_a_message_with_calls(fault_stand: Stand, data: st.DataObject) -> None:
    await check_message_with_calls(fault_stand, data)


@pytest.mark.slow
@THOROUGH
@given(data=st.data())
async def test_many_messages_with_calls(fault_stand: Stand, data: st.DataObject) -> None:
    await check_message_with_calls(fault_stand, data)
