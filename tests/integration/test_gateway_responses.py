"""OpenAI's Responses API by OpenAI's own client, over HTTP to a real gateway process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from libs.errors import WorkerLost
from libs.text import IncrementalDetokenizer
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand, open_stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The primes are 2, 3 and 5. 😀"
EOS = 2
LENGTH = 2  # FINISH_REASON_LENGTH


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    async with open_stand(tmp_path_factory.mktemp("responses"), "--sse-heartbeat-seconds", "0.2") as stand:
        yield stand


@pytest.fixture
def stand(shared_stand: Stand) -> Stand:
    """The shared stand with an engine that answers well."""
    shared_stand.engine.scripts.clear()
    shared_stand.engine.default_script = Script(
        token_ids=[*shared_stand.encode(TEXT), EOS], ends_with_stop_token=True, num_cached_tokens=16
    )
    return shared_stand


@pytest_asyncio.fixture(loop_scope="module")
async def client(stand: Stand) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stand.gateway.base_url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


async def post(stand: Stand, **fields: Any) -> tuple[int, Any]:
    body = {"model": MODEL_NAME, "input": "Name three primes."} | fields
    async with stand.gateway.http.post("/v1/responses", json=body) as response:
        return response.status, await response.json()


async def events(stand: Stand, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked to bear its type as its name and its place as its number."""
    body = {"model": MODEL_NAME, "input": "Name three primes.", "stream": True} | fields
    async with stand.gateway.http.post("/v1/responses", json=body) as response:
        raw = (await response.read()).decode()
    found: list[dict[str, Any]] = []
    for block in raw.removesuffix("\n\n").split("\n\n"):
        if block == ": ping":
            continue
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def prompt_of(stand: Stand) -> str:
    detokenizer = IncrementalDetokenizer(stand.model_text.tokenizer, skip_special_tokens=False)
    return detokenizer.add(list(stand.engine.submits[-1].prompt_token_ids)) + detokenizer.flush()


async def test_a_response_is_created(stand: Stand, client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(
        model=MODEL_NAME,
        input="Name three primes.",
        instructions="You are terse.",
        temperature=0.25,
        top_p=0.5,
        max_output_tokens=64,
        metadata={"trace": "1"},
        store=False,
    )

    params = stand.engine.submits[-1].sampling_params
    assert response.output_text == TEXT
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (params.temperature, params.top_p, params.max_output_tokens) == (0.25, 0.5, 64)
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.25, 0.5, 64)
    assert (response.instructions, response.metadata) == ("You are terse.", {"trace": "1"})
    assert "You are terse." in prompt_of(stand)
    assert response.usage is not None
    assert response.usage.input_tokens == len(stand.engine.submits[-1].prompt_token_ids)
    assert response.usage.input_tokens_details.cached_tokens == 16
    assert response.usage.output_tokens == len(stand.encode(TEXT)) + 1


async def test_a_streamed_response_is_the_whole_one(stand: Stand, client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model=MODEL_NAME, input="Name three primes.")
    async with client.responses.stream(model=MODEL_NAME, input="Name three primes.") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        streamed = await stream.get_final_response()

    assert "".join(deltas) == TEXT
    same = {"id", "created_at", "output"}
    assert streamed.output_text == whole.output_text == TEXT
    assert {name: value for name, value in streamed.to_dict().items() if name not in same} == {
        name: value for name, value in whole.to_dict().items() if name not in same
    }


async def test_a_stream_has_the_documented_events_in_their_order(stand: Stand) -> None:
    found = await events(stand)

    types = [event["type"].removeprefix("response.") for event in found]
    assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(types[4:-4]) == {"output_text.delta"}
    assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[-4]["text"] == TEXT


async def test_an_answer_that_is_cut_is_incomplete(stand: Stand, client: openai.AsyncOpenAI) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("One two"), reason=LENGTH)

    response = await client.responses.create(model=MODEL_NAME, input="Count.", max_output_tokens=2)
    found = await events(stand, max_output_tokens=2)

    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_conversation_goes_on_with_what_was_answered(stand: Stand, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL_NAME, input="Name three primes.")
    turns: list[Any] = [
        {"role": "developer", "content": "You are terse."},
        {"role": "user", "content": [{"type": "input_text", "text": "Name three primes."}]},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": "More."},
    ]
    await client.responses.create(model=MODEL_NAME, input=turns)

    prompt = prompt_of(stand)
    places = [prompt.index(text) for text in ("You are terse.", "Name three primes.", TEXT, "More.")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}, "input[1].role"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"background": True}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(stand: Stand, fields: dict[str, Any], param: str) -> None:
    status, body = await post(stand, **fields)

    assert (status, body["error"]["param"]) == (400, param)
    assert param in body["error"]["message"]


async def test_an_engine_that_fails_mid_stream_is_a_failed_response(
    stand: Stand, client: openai.AsyncOpenAI
) -> None:
    stand.engine.default_script = Script(
        token_ids=stand.encode("One two"), goes_on=True, error=WorkerLost("The worker is gone.")
    )

    stream = await client.responses.create(model=MODEL_NAME, input="Count.", stream=True)
    found = [event async for event in stream]

    last = found[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "The worker is gone."


async def test_silence_is_filled_with_comments_that_clients_ignore(
    stand: Stand, client: openai.AsyncOpenAI
) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode(TEXT), first_delay_seconds=0.5)

    async with client.responses.stream(model=MODEL_NAME, input="Count.") as stream:
        response = await stream.get_final_response()

    assert response.output_text == TEXT
