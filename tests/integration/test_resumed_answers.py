"""Answers that go on with another engine, in every dialect, as clients, telemetry and metrics see them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from libs.errors import Draining, NoEngineAvailable, WorkerLost
from libs.protogen.inference.v1 import inference_pb2, inference_pb2_grpc
from libs.protogen.telemetry.v1 import telemetry_pb2
from libs.rpc import make_channel
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand
from tests.integration.http_answers import CHAT, ONCE, QUESTION, TEXT, chat, post, streamed_text

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAID = "one two three four five six"
LOADING = Script(error=NoEngineAvailable("The model is loaded.", retry_after_seconds=2.0))
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION},
    TEXT: {"prompt": "Say hi.", "max_tokens": 50},
    "/v1/responses": {"input": "Say hi."},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 50},
}


def breaks_after(stand: Stand, num_tokens: int, **fields: Any) -> Script:
    """Loses its worker after so many tokens."""
    fault = fields or {"error": WorkerLost("The worker is gone.")}
    return Script(token_ids=stand.encode(SAID)[:num_tokens], goes_on=True, num_cached_tokens=4, **fault)


def knows(stand: Stand, said: str = SAID, **fields: Any) -> Script:
    """Goes on from wherever another has left off."""
    return Script(token_ids=stand.encode(said), goes_on=True, num_cached_tokens=11, **fields)


def text_of(path: str, answer: Any) -> str:
    """The text of a whole answer or of a stream's events, in any dialect."""
    if isinstance(answer, dict):
        match path:
            case "/v1/responses":
                return str(answer["output"][0]["content"][0]["text"])
            case "/v1/messages":
                return str(answer["content"][0]["text"])
            case _:
                choice = answer["choices"][0]
                return str(choice["text"] if path == TEXT else choice["message"]["content"])
    if path in (CHAT, TEXT):
        return streamed_text(answer)
    deltas = [event["delta"] for event in answer if "delta" in event]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


def events_of(raw: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streaming", [True, False])
async def test_every_dialect_goes_on_where_it_was(stand: Stand, path: str, is_streaming: bool) -> None:
    stand.engine.scripts.extend([breaks_after(stand, 2), breaks_after(stand, 4)])
    stand.engine.default_script = knows(stand)

    answer = await post(stand, path, BODIES[path] | {"stream": is_streaming})
    record = await stand.telemetry.wait_for(answer.request_id)

    assert answer.status == 200
    assert text_of(path, events_of(answer.raw) if is_streaming else answer.json) == SAID
    assert b"error" not in answer.raw or b'"error":null' in answer.raw
    assert (record.status, record.num_retries) == (telemetry_pb2.REQUEST_STATUS_STOP, 2)
    assert (record.completion_tokens, record.discarded_tokens) == (len(stand.encode(SAID)), 0)
    # The prompt is what it was, and what the first engine had of it is what is told.
    assert (record.prompt_tokens, record.cached_tokens) == (len(stand.engine.submits[-1].prompt_token_ids), 4)


async def test_a_call_over_grpc_goes_on_where_it_was(stand: Stand) -> None:
    stand.engine.scripts.append(breaks_after(stand, 2))
    stand.engine.default_script = knows(stand)

    async with make_channel(stand.gateway.grpc_address) as channel:
        client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        question = [inference_pb2.ChatMessage(role="user", content="Count.")]
        call = client.ChatCompletion(inference_pb2.ChatCompletionRequest(model=MODEL_NAME, messages=question))
        messages = [message async for message in call]

    text = "".join(choice.content for message in messages for choice in message.choices)
    assert text == SAID


async def test_a_seed_that_the_gateway_drew_is_kept(stand: Stand) -> None:
    stand.engine.scripts.append(breaks_after(stand, 2))
    stand.engine.default_script = knows(stand)
    num_submits = len(stand.engine.submits)

    assert (await chat(stand, temperature=1.0)).status == 200

    first, again = list(stand.engine.submits)[num_submits:]
    assert first.sampling_params.seed != 0
    assert again.sampling_params == first.sampling_params


async def test_the_wait_for_an_engine_is_filled_with_signs_of_life(stand: Stand) -> None:
    stand.engine.scripts.extend([breaks_after(stand, 2), LOADING, LOADING])
    stand.engine.default_script = knows(stand)

    answer = await chat(stand, stream=True)

    beginning, _, end = answer.raw.partition(b" two")
    assert streamed_text(answer.events) == SAID
    assert b": ping\n\n" in end
    # They come where nothing else does, and what follows them is the stream that it was.
    assert b'"role"' in beginning
    assert b'"role"' not in end
    assert end.endswith(b"data: [DONE]\n\n")


async def test_who_leaves_while_an_engine_is_looked_for_leaves_nothing_behind(stand: Stand) -> None:
    stand.engine.scripts.append(breaks_after(stand, 2))
    stand.engine.default_script = LOADING
    num_submits = len(stand.engine.submits)

    leaving = asyncio.create_task(chat(stand, stream=True))
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits + 1)
    request_id = stand.engine.submits[-1].request_id
    leaving.cancel()
    record = await stand.telemetry.wait_for(request_id)

    assert record.status == telemetry_pb2.REQUEST_STATUS_ABORTED
    assert record.completion_tokens + record.discarded_tokens == 2
    assert not stand.engine.running_ids
    assert await stand.gateway.metric("octavo_gateway_requests_in_flight") == 0


async def test_a_stop_string_half_shown_is_completed_by_the_next_engine(stand: Stand) -> None:
    # What was held back at the loss is the beginning of it.
    stand.engine.scripts.append(breaks_after(stand, 3))
    stand.engine.default_script = knows(stand)

    answer = await chat(stand, stream=True, stop=["three four"])
    record = await stand.telemetry.wait_for(answer.request_id)

    assert streamed_text(answer.events) == "one two "
    assert answer.events[-1] == "[DONE]"
    # With the token that completed it.
    assert record.completion_tokens == 4


async def test_a_character_whose_bytes_come_from_two_engines_is_whole(stand: Stand) -> None:
    said = "a 😀 b"
    token_ids = stand.encode(said)
    tokenizer = stand.model_text.tokenizer
    cuts = {number: b"".join(map(tokenizer.token_bytes, token_ids[:number])) for number in range(len(token_ids))}
    middle = next(number for number, shown in cuts.items() if "\ufffd" in shown.decode(errors="replace"))
    stand.engine.scripts.append(
        Script(token_ids=token_ids[:middle], goes_on=True, error=WorkerLost("The worker is gone."))
    )
    stand.engine.default_script = knows(stand, said)

    assert streamed_text((await chat(stand, stream=True)).events) == said


async def test_the_limit_counts_the_output_of_all_engines(stand: Stand) -> None:
    stand.engine.scripts.append(breaks_after(stand, 2))
    stand.engine.default_script = knows(stand)

    answer = await chat(stand, max_tokens=4)

    assert answer.json["choices"][0]["finish_reason"] == "length"
    assert answer.json["usage"]["completion_tokens"] == 4
    assert stand.engine.submits[-1].sampling_params.max_output_tokens == 4


async def test_an_engine_that_goes_away_hands_its_streams_on(stand: Stand) -> None:
    stand.engine.scripts.append(breaks_after(stand, 2, error=Draining("It stops.", retry_after_seconds=1.0)))
    stand.engine.default_script = knows(stand)

    answer = await chat(stand, stream=True)

    assert streamed_text(answer.events) == SAID
    assert answer.events[-1] == "[DONE]"


async def test_a_request_that_kills_each_worker_is_told_so_and_the_others_go_on(stand: Stand) -> None:
    poisonous = breaks_after(stand, 2)
    num_failed = await stand.gateway.metric("octavo_gateway_resumptions_total", outcome="failed")
    stand.engine.scripts.extend([poisonous] * 3)
    stand.engine.default_script = knows(stand)

    answer = await chat(stand, stream=True)
    record = await stand.telemetry.wait_for(answer.request_id)

    assert streamed_text(answer.events[:-1]) == "one two"
    assert answer.events[-1]["error"]["code"] == "worker_lost"
    assert (record.status, record.completion_tokens) == (telemetry_pb2.REQUEST_STATUS_ERROR, 2)
    assert await stand.gateway.metric("octavo_gateway_resumptions_total", outcome="failed") == num_failed + 1
    assert streamed_text((await chat(stand, stream=True)).events) == SAID


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_the_receipt_tells_the_time_without_an_engine(stand: Stand, is_streaming: bool) -> None:
    stand.engine.scripts.extend([breaks_after(stand, 2), LOADING])
    stand.engine.default_script = knows(stand)

    answer = await chat(stand, stream=is_streaming, timings=True)

    receipt = (answer.events[-2] if is_streaming else answer.json)["timings"]
    segments = receipt["segments_us"]
    assert sum(segments.values()) + receipt["unattributed_us"] == receipt["wall_us"]
    # One pause of a quarter of a second at least.
    assert segments["resume"] >= 250_000
    assert segments["retries"] == 0
    assert abs(receipt["unattributed_us"]) < 0.02 * receipt["wall_us"]
    assert receipt["retries"] == 2
    assert [stall["reason"] for stall in receipt["stalls"]["first"]] == ["resume"]
    assert receipt["choices"][0]["output_tokens"] == len(stand.encode(SAID))


async def test_several_choices_go_on_each_from_where_it_was(stand: Stand) -> None:
    first = dataclasses.replace(
        breaks_after(stand, 4),
        step_delay_seconds=0.05,
        other_choices=(knows(stand, "done"), Script(token_ids=stand.encode(SAID)[:1], goes_on=True, hangs=True)),
    )
    stand.engine.scripts.append(first)
    stand.engine.default_script = knows(stand)

    answer = await chat(stand, n=3)
    record = await stand.telemetry.wait_for(answer.request_id)

    assert [choice["message"]["content"] for choice in answer.json["choices"]] == [SAID, "done", SAID]
    assert [choice.choice_index for choice in stand.engine.submits[-1].choices] == [0, 2]
    assert record.completion_tokens == answer.json["usage"]["completion_tokens"] == 2 * len(stand.encode(SAID)) + 1


async def test_prompts_of_one_request_go_on_by_themselves(stand: Stand) -> None:
    stand.engine.scripts.append(breaks_after(stand, 2))
    stand.engine.default_script = knows(stand)

    answer = await post(stand, TEXT, {"prompt": ["Say hi.", "Say ho."], "max_tokens": 50})

    assert [choice["text"] for choice in answer.json["choices"]] == [SAID, SAID]


async def test_a_client_that_reads_one_answer_sees_one_id_and_one_role(stand: Stand) -> None:
    stand.engine.scripts.extend(breaks_after(stand, number) for number in (1, 2, 3, 4))
    stand.engine.default_script = knows(stand)
    body = {"model": MODEL_NAME, "messages": QUESTION, "stream": True}

    async with stand.gateway.http.post(CHAT, json=body, headers=ONCE) as response:
        events = events_of(await response.read())

    assert streamed_text(events) == SAID
    assert len({event["id"] for event in events}) == 1
    assert sum("role" in choice["delta"] for event in events for choice in event["choices"]) == 1
