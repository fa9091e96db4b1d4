"""A real gateway process over HTTP, between fakes that speak the real protocols."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from libs.errors import InvalidLogits, NoEngineAvailable, WorkerLost
from libs.protogen.telemetry.v1 import telemetry_pb2
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand, events_of, open_stand, run_gateway, write_keys
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The primes are 2, 3 and 5. 😀"
EOS = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    async with open_stand(tmp_path_factory.mktemp("gateway")) as stand:
        yield stand


@pytest.fixture
def stand(shared_stand: Stand) -> Stand:
    """The shared stand with an engine that answers well."""
    engine, router = shared_stand.engine, shared_stand.router
    engine.scripts.clear()
    engine.default_script = Script(
        token_ids=[*shared_stand.encode(TEXT), EOS], ends_with_stop_token=True, num_cached_tokens=16
    )
    router.refusal, router.holds = None, False
    return shared_stand


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Name three primes."}]
    return {"model": MODEL_NAME, "messages": messages} | fields


async def post(stand: Stand, **fields: Any) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    async with stand.gateway.http.post("/v1/chat/completions", json=chat(**fields)) as response:
        return response.status, await response.json(), response.headers


async def stream_bytes(stand: Stand, **fields: Any) -> bytes:
    async with stand.gateway.http.post("/v1/chat/completions", json=chat(stream=True, **fields)) as response:
        assert response.status == 200
        return await response.read()


def text_of(events: list[Any]) -> str:
    return "".join(
        event["choices"][0]["delta"].get("content", "")
        for event in events
        if isinstance(event, dict) and event.get("choices")
    )


# --- Good answers.


async def test_a_stream_has_every_part_once_and_in_order(stand: Stand) -> None:
    async with stand.gateway.http.post("/v1/chat/completions", json=chat(stream=True)) as response:
        raw, headers = await response.read(), response.headers

    events = events_of(raw)
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    assert raw.count(b"[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == TEXT
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert [event["choices"][0]["finish_reason"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert len({event["id"] for event in events[:-1]}) == 1
    assert events[0]["id"] == f"chatcmpl-{headers['X-Octavo-Request-Id']}"
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert not any("usage" in event for event in events[:-1])


async def test_a_whole_answer_equals_the_stream(stand: Stand) -> None:
    status, body, _ = await post(stand)
    events = events_of(await stream_bytes(stand, stream_options={"include_usage": True}))

    assert status == 200
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == events[-2]["usage"]
    assert events[-2]["choices"] == []
    assert text_of(events) == TEXT
    assert body["usage"]["completion_tokens"] == len(stand.encode(TEXT)) + 1
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_what_the_client_asks_for_reaches_the_engine(stand: Stand) -> None:
    status, _, _ = await post(
        stand,
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=-5,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[11],
        ignore_eos=True,
    )

    submit = stand.engine.submits[-1]
    params = submit.sampling_params
    assert status == 200
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 7, 0.1)
    assert params.seed == 2**64 - 5
    assert (params.max_output_tokens, params.min_output_tokens) == (9, 2)
    assert (list(params.stop_token_ids), params.ignore_eos) == ([11], True)
    assert len(submit.choices) == 1
    assert len(submit.cache_salt) == 32
    assert 590 <= submit.remaining_time.seconds <= 600
    assert stand.router.enqueues[-1].num_prompt_tokens == len(submit.prompt_token_ids)
    assert len(stand.router.enqueues[-1].prefix_hashes) == len(submit.prompt_token_ids) // 16


async def test_seeds_are_drawn_when_none_is_given(stand: Stand) -> None:
    for _ in range(2):
        await post(stand)

    seeds = [submit.sampling_params.seed for submit in stand.engine.submits[-2:]]
    assert len(set(seeds)) == 2
    assert not stand.engine.submits[-1].sampling_params.HasField("top_p")


async def test_the_length_limit_is_a_finish_reason(stand: Stand) -> None:
    status, body, headers = await post(stand, max_tokens=3)
    record = await stand.telemetry.wait_for(headers["X-Octavo-Request-Id"])

    assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
    assert body["usage"]["completion_tokens"] == 3
    assert record.status == telemetry_pb2.REQUEST_STATUS_LENGTH


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_stop_string_ends_the_answer_and_aborts_the_engine(stand: Stand, is_streaming: bool) -> None:
    token_ids = stand.encode("one two three four five six seven")
    stand.engine.default_script = Script(
        token_ids=token_ids, tokens_per_step=5, step_delay_seconds=60, num_cached_tokens=8
    )
    options = {"stream_options": {"include_usage": True}} if is_streaming else {}

    async with stand.gateway.http.post(
        "/v1/chat/completions", json=chat(stop=[" three"], stream=is_streaming, **options)
    ) as response:
        raw, request_id = await response.read(), response.headers["X-Octavo-Request-Id"]
    record = await stand.telemetry.wait_for(request_id)

    if is_streaming:
        events = events_of(raw)
        text, usage = text_of(events), events[-2]["usage"]
    else:
        body = json.loads(raw)
        text, usage = body["choices"][0]["message"]["content"], body["usage"]
    assert text == "one two"
    assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (3, 8)
    assert stand.engine.aborted_ids[-1] == request_id
    assert record.status == telemetry_pb2.REQUEST_STATUS_STOP
    assert record.completion_tokens == 3
    assert record.discarded_tokens == 2


async def test_many_streams_at_once_all_end_well(stand: Stand) -> None:
    raws = await asyncio.gather(*(stream_bytes(stand) for _ in range(100)))

    assert all(raw.count(b"[DONE]") == 1 for raw in raws)
    assert {text_of(events_of(raw)) for raw in raws} == {TEXT}
    assert stand.engine.num_streams == 1


async def test_a_slow_reader_gets_everything(stand: Stand) -> None:
    token_ids = stand.encode("word " * 3000)
    stand.engine.default_script = Script(token_ids=token_ids, tokens_per_step=1)

    async with stand.gateway.http.post("/v1/chat/completions", json=chat(stream=True, max_tokens=8000)) as response:
        await asyncio.sleep(0.5)
        events = events_of(await response.read())

    assert text_of(events) == "word " * 3000


# --- OpenAI's own client.


async def test_the_openai_client_lists_models_completes_and_streams(stand: Stand) -> None:
    def talk() -> tuple[list[str], str, str | None, list[str], int]:
        with openai.OpenAI(base_url=f"{stand.gateway.base_url}/v1", api_key="none", max_retries=0) as client:
            models = [model.id for model in client.models.list()]
            found = client.models.retrieve(MODEL_NAME).id
            messages: Any = [{"role": "user", "content": "Name three primes."}]
            whole = client.chat.completions.create(model=MODEL_NAME, messages=messages)
            pieces: list[str] = []
            num_tokens = 0
            for chunk in client.chat.completions.create(
                model=MODEL_NAME, messages=messages, stream=True, stream_options={"include_usage": True}
            ):
                pieces += [choice.delta.content or "" for choice in chunk.choices]
                num_tokens += chunk.usage.completion_tokens if chunk.usage else 0
            return models, found, whole.choices[0].message.content, pieces, num_tokens

    models, found, whole, pieces, num_tokens = await asyncio.to_thread(talk)

    assert (models, found) == ([MODEL_NAME], MODEL_NAME)
    assert whole == "".join(pieces) == TEXT
    assert num_tokens == len(stand.encode(TEXT)) + 1


async def test_the_async_openai_client_streams_and_understands_errors(stand: Stand) -> None:
    messages: Any = [{"role": "user", "content": "Name three primes."}]
    async with openai.AsyncOpenAI(base_url=f"{stand.gateway.base_url}/v1", api_key="none", max_retries=0) as client:
        pieces = [
            choice.delta.content or ""
            async for chunk in await client.chat.completions.create(
                model=MODEL_NAME, messages=messages, stream=True
            )
            for choice in chunk.choices
        ]
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nope", messages=messages)
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model=MODEL_NAME, messages=messages, n=200)
        stand.engine.default_script = Script(token_ids=[1, 2, 3], error=InvalidLogits("NaN in the logits"))
        with pytest.raises(openai.APIError) as broken:
            async for _ in await client.chat.completions.create(model=MODEL_NAME, messages=messages, stream=True):
                pass

    assert "".join(pieces) == TEXT
    assert unknown.value.code == "model_not_found"
    assert wrong.value.param == "n"
    assert "NaN" in broken.value.message


async def test_models_have_openais_shape_and_keep_their_time(stand: Stand) -> None:
    async with stand.gateway.http.get("/v1/models") as response:
        listed = await response.json()
    async with stand.gateway.http.get(f"/v1/models/{MODEL_NAME}") as response:
        one = await response.json()

    assert listed == {"object": "list", "data": [one]}
    assert one["object"] == "model"
    assert one["owned_by"]
    assert one["max_model_len"] == 8192


# --- Broken input.

LONG_PROMPT = [{"role": "user", "content": "a " * 9000}]


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b"", 400, None, None),
        (b"hello", 400, None, None),
        (b'{"model": "x"', 400, None, None),
        (b"[]", 400, None, None),
        (b"[" * 100_000, 400, None, None),
        (b'{"temperature": NaN}', 400, None, None),
        (b'{"temperature": -Infinity}', 400, None, None),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400, None, None),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, None, None),
        (chat(temperature="NaN"), 400, "temperature", None),
        (chat(temperature=-1), 400, "temperature", None),
        (chat(top_p=0), 400, "top_p", None),
        (chat(top_k=0.01), 400, "top_k", None),
        (chat(max_tokens=0), 400, "max_tokens", None),
        (chat(max_tokens=-1), 400, "max_tokens", None),
        (chat(max_tokens=1.5), 400, "max_tokens", None),
        (chat(stream="yes"), 400, "stream", None),
        (chat(messages=[]), 400, "messages", None),
        (chat(messages=[{"role": "user", "content": "x"}] * 100_000), 400, "messages", None),
        (chat(messages=[{"role": "user", "content": "x"}] * 3000), 400, "messages", None),
        (chat(n=100_000), 400, "n", None),
        (chat(n=0, stream=True), 400, "n", None),
        (chat(best_of=10**6), 400, "best_of", "unsupported_field"),
        (chat(bad_words=["x"] * 50_000), 400, "bad_words", None),
        (chat(presence_penalty=1e9), 400, "presence_penalty", None),
        (chat(repetition_penalty=0), 400, "repetition_penalty", None),
        (chat(stop=["x"] * 100_000), 400, "stop", None),
        (chat(stop="x" * 1_000_000), 400, "stop", None),
        (chat(logit_bias={str(i): 1 for i in range(49152)}), 400, "logit_bias", None),
        (chat(chat_template="{{ 'x' * 10**9 }}"), 400, "chat_template", "unsupported_field"),
        (chat(unheard_of=1), 400, "unheard_of", None),
        (chat(model="../../etc/passwd"), 404, "model", "model_not_found"),
        (chat(model="nope"), 404, "model", "model_not_found"),
        (chat(messages=LONG_PROMPT), 400, "messages", "context_length_exceeded"),
        (chat(messages=LONG_PROMPT, stream=True), 400, "messages", "context_length_exceeded"),
        (chat(max_tokens=10**9), 400, "messages", "context_length_exceeded"),
        (chat(max_tokens=10**9, stream=True), 400, "messages", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, bytes | dict) else None,
)
async def test_broken_input_is_a_clear_4xx_in_openais_shape(
    stand: Stand, body: Any, status: int, param: str | None, code: str | None
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    num_submits = len(stand.engine.submits)

    async with stand.gateway.http.post(
        "/v1/chat/completions", data=raw, headers={"Content-Type": "application/json"}
    ) as response:
        answer, content_type = await response.json(), response.content_type

    error = answer["error"]
    assert (response.status, error["param"], error["code"]) == (status, param, code)
    assert content_type == "application/json"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000
    assert len(stand.engine.submits) == num_submits
    if code == "context_length_exceeded":
        assert "8192" in error["message"]


async def test_the_borders_of_the_context(stand: Stand) -> None:
    def prompt(num_words: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "a " * num_words}]

    _, body, _ = await post(stand, messages=prompt(100), max_tokens=1)
    num_other_tokens = body["usage"]["prompt_tokens"] - 100
    answers = [
        await post(stand, messages=prompt(8192 - num_other_tokens - room), max_tokens=1) for room in (1, 0, -1)
    ]

    assert [status for status, _, _ in answers] == [200, 400, 400]
    assert answers[0][1]["usage"]["total_tokens"] == 8192
    assert "8192" in answers[1][1]["error"]["message"]
    assert "8193" in answers[2][1]["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "route_not_found"),
        ("GET", "/v1/nope", 404, "route_not_found"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404, "model_not_found"),
        ("GET", "/v1/models/org/name", 404, "model_not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_wrong_routes_answer_in_openais_shape(
    stand: Stand, method: str, path: str, status: int, code: str
) -> None:
    async with stand.gateway.http.request(method, path) as response:
        error = (await response.json())["error"]

    assert (response.status, error["code"]) == (status, code)
    assert ("Allow" in response.headers) is (status == 405)
    assert response.headers["X-Octavo-Request-Id"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
async def test_another_content_type_is_refused(stand: Stand, headers: dict[str, str]) -> None:
    async with stand.gateway.http.post(
        "/v1/chat/completions", data=json.dumps(chat()).encode(), headers=headers
    ) as response:
        error = (await response.json())["error"]

    assert (response.status, error["code"]) == (415, "unsupported_media_type")


async def test_a_body_over_the_limit_is_refused_with_and_without_a_length(stand: Stand) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(6):
            yield b" " * (1024 * 1024)

    statuses = []
    for data in (b" " * (5 * 1024 * 1024), chunks()):
        async with stand.gateway.http.post(
            "/v1/chat/completions", data=data, headers={"Content-Type": "application/json"}
        ) as response:
            statuses.append((response.status, (await response.json())["error"]["code"]))

    assert statuses == [(413, "payload_too_large")] * 2


async def test_a_large_body_is_read_alike_in_one_part_and_in_many(stand: Stand) -> None:
    raw = json.dumps(chat(messages=[{"role": "user", "content": "the quick brown fox " * 150_000}])).encode()
    members = json.dumps(chat(logit_bias={str(index): 1 for index in range(70_000)})).encode()

    async def parts(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 9_973):
            yield body[start : start + 9_973]

    errors = []
    for body in (raw, members):
        for data in (body, parts(body)):
            async with stand.gateway.http.post(
                "/v1/chat/completions", data=data, headers={"Content-Type": "application/json"}
            ) as response:
                errors.append((response.status, (await response.json())["error"]))

    assert [(status, error["code"]) for status, error in errors[::2]] == [
        (400, "context_length_exceeded"),
        (400, None),
    ]
    assert errors[::2] == errors[1::2]


@pytest.mark.parametrize(
    "raw", [b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n"]
)
async def test_what_is_no_http_is_answered_in_openais_shape(stand: Stand, raw: bytes) -> None:
    port = int(stand.gateway.base_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    writer.write(raw)
    answer = await reader.read()
    writer.close()

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"Server: octavo\r\n" in head + b"\r\n"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("expectation", "first_line"), [("100-continue", b"100"), ("200-maybe", b"200")])
async def test_a_client_that_asks_before_it_sends_its_body_is_answered(
    stand: Stand, expectation: str, first_line: bytes
) -> None:
    port = int(stand.gateway.base_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(chat()).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: {expectation}\r\n\r\n"
    )

    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()

    assert answer.split()[1] == first_line
    assert b"HTTP/1.1 200 OK" in answer


async def test_a_body_that_breaks_off_harms_nobody(stand: Stand) -> None:
    port = int(stand.gateway.base_url.rpartition(":")[2])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for rest in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + rest)
        await writer.drain()
        writer.close()

    status, _, _ = await post(stand)

    assert status == 200
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await stand.gateway.metric("octavo_gateway_requests_in_flight"):
            await asyncio.sleep(0.02)


async def test_a_clients_request_id_is_echoed_and_recorded_beside_ours(stand: Stand) -> None:
    for sent, echoed in (("my-id-1", "my-id-1"), ("x" * 200, None), ("two words", None)):
        async with stand.gateway.http.post(
            "/v1/chat/completions", json=chat(), headers={"X-Request-Id": sent}
        ) as response:
            ours = response.headers["X-Octavo-Request-Id"]
            assert response.headers["X-Request-Id"] == (echoed or ours)
        record = await stand.telemetry.wait_for(ours)
        assert record.client_request_id == (echoed or "")


# --- Clients that leave, engines that fail.


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_its_request_on_the_engine(
    stand: Stand, is_streaming: bool, phase: str
) -> None:
    token_ids = [] if phase == "prefill" else stand.encode("one two three")
    stand.engine.default_script = Script(token_ids=token_ids, hangs=True)
    num_submits = len(stand.engine.submits)

    leaving = asyncio.create_task(post_and_read(stand, stream=is_streaming))
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits)
    submit = stand.engine.submits[-1]
    request_id = submit.request_id
    await stand.until_all_is_taken()
    leaving.cancel()
    await stand.engine.wait_until(lambda: request_id in stand.engine.aborted_ids)
    record = await stand.telemetry.wait_for(request_id)
    await stand.router.wait_until(lambda: request_id in stand.router.finished_ids)

    assert record.status == telemetry_pb2.REQUEST_STATUS_ABORTED
    assert record.completion_tokens == len(token_ids)
    assert record.prompt_tokens == len(submit.prompt_token_ids)
    assert request_id not in stand.engine.running_ids


async def post_and_read(stand: Stand, **fields: Any) -> bytes:
    async with stand.gateway.http.post("/v1/chat/completions", json=chat(**fields)) as response:
        return await response.read()


async def test_a_client_that_leaves_while_waiting_for_a_place_withdraws_it(stand: Stand) -> None:
    stand.router.holds = True
    num_asks, num_submits = len(stand.router.enqueues), len(stand.engine.submits)

    leaving = asyncio.create_task(post_and_read(stand))
    await stand.router.wait_until(lambda: len(stand.router.enqueues) > num_asks)
    request_id = stand.router.enqueues[-1].request_id
    leaving.cancel()
    await stand.router.wait_until(lambda: request_id in stand.router.cancelled_ids)
    record = await stand.telemetry.wait_for(request_id)

    assert record.status == telemetry_pb2.REQUEST_STATUS_ABORTED
    assert (record.http_status, record.engine_id) == (0, "")
    assert len(stand.engine.submits) == num_submits


async def test_an_engine_that_fails_mid_stream_is_one_error_event_and_the_end(stand: Stand) -> None:
    # No try brings more, so the request is not to kill more workers.
    stand.engine.default_script = Script(
        token_ids=stand.encode("one two three"), goes_on=True, error=WorkerLost("A worker died.")
    )

    async with stand.gateway.http.post("/v1/chat/completions", json=chat(stream=True)) as response:
        raw, request_id = await response.read(), response.headers["X-Octavo-Request-Id"]
    record = await stand.telemetry.wait_for(request_id)

    events = events_of(raw)
    assert b"[DONE]" not in raw
    assert text_of(events[:-1]) == "one two three"
    assert events[-1]["error"] == {
        "message": "A worker died.",
        "type": "server_error",
        "param": None,
        "code": "worker_lost",
    }
    assert not any(event["choices"][0]["finish_reason"] for event in events[:-1])
    assert (record.status, record.error_reason) == (telemetry_pb2.REQUEST_STATUS_ERROR, "WORKER_LOST")
    assert record.http_status == 200
    assert record.completion_tokens == 3


async def test_an_engine_that_fails_a_whole_answer_is_a_5xx(stand: Stand) -> None:
    stand.engine.default_script = Script(
        token_ids=stand.encode("one two"), goes_on=True, error=WorkerLost("A worker died.")
    )

    status, body, headers = await post(stand)
    record = await stand.telemetry.wait_for(headers["X-Octavo-Request-Id"])

    assert (status, body["error"]["code"]) == (502, "worker_lost")
    assert (record.status, record.http_status) == (telemetry_pb2.REQUEST_STATUS_ERROR, 502)


async def test_a_failure_before_the_first_token_is_invisible_when_the_next_try_works(stand: Stand) -> None:
    stand.engine.scripts.append(Script(error=WorkerLost("A worker died.")))

    async with stand.gateway.http.post("/v1/chat/completions", json=chat(stream=True)) as response:
        events, request_id = events_of(await response.read()), response.headers["X-Octavo-Request-Id"]
    record = await stand.telemetry.wait_for(request_id)

    assert text_of(events) == TEXT
    assert (record.status, record.num_retries) == (telemetry_pb2.REQUEST_STATUS_STOP, 1)


async def test_a_refusal_of_the_router_has_a_time_to_come_back(stand: Stand) -> None:
    stand.router.refusal = NoEngineAvailable("Nobody is there.", retry_after_seconds=3.2)

    status, body, headers = await post(stand, stream=True)
    record = await stand.telemetry.wait_for(headers["X-Octavo-Request-Id"])

    assert (status, body["error"]["code"]) == (503, "no_engine_available")
    assert headers["Retry-After"] == "4"
    assert record.status == telemetry_pb2.REQUEST_STATUS_REJECTED


async def test_the_engine_dies_before_and_after_the_first_token_and_both_go_on_when_it_comes_back(
    stand: Stand,
) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("one"), hangs=True)
    num_submits, address = len(stand.engine.submits), stand.engine.address
    streaming = asyncio.create_task(post_and_read(stand, stream=True))
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits)
    await stand.until_all_is_taken()
    stand.engine.default_script = Script(hangs=True)
    waiting = asyncio.create_task(post(stand))
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits + 2)

    await stand.engine.stop()
    async with stand.gateway.http.get("/readyz") as response:
        ready_status, ready_body = response.status, await response.json()
    async with stand.gateway.http.get("/health") as response:
        assert response.status == ready_status
    stand.engine.default_script = Script(token_ids=stand.encode("one two three"), goes_on=True)
    await stand.engine.start(address)
    await stand.gateway.wait_ready()
    raw = await streaming
    status, body, _ = await waiting
    status_after, body_after, _ = await post(stand)

    assert text_of(events_of(raw)) == "one two three"
    assert raw.endswith(b"data: [DONE]\n\n")
    assert (status, body["choices"][0]["message"]["content"]) == (200, "one two three")
    assert (ready_status, ready_body["error"]["code"]) == (503, "no_engine_available")
    assert (status_after, body_after["choices"][0]["message"]["content"]) == (200, "one two three")


async def test_metrics_show_the_engines_as_they_are_now_and_ends_that_add_up(stand: Stand) -> None:
    stand.engine.default_script = Script(hangs=True)
    num_submits = len(stand.engine.submits)
    leaving = asyncio.create_task(post_and_read(stand))
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits)
    running = await stand.gateway.metric("octavo_engine_running_requests", engine_id="fake-0")
    request_id = stand.engine.submits[-1].request_id
    leaving.cancel()
    await stand.telemetry.wait_for(request_id)
    idle = await stand.gateway.metric("octavo_engine_running_requests", engine_id="fake-0")

    started = await stand.gateway.metric("octavo_gateway_requests_started_total")
    ended = [
        await stand.gateway.metric("octavo_gateway_requests_ended_total", status=status)
        for status in ("stop", "length", "aborted", "rejected", "error")
    ]
    in_flight = await stand.gateway.metric("octavo_gateway_requests_in_flight")
    blocks = await stand.gateway.metric("octavo_engine_kv_blocks_total", engine_id="fake-0")

    assert (running, idle, in_flight, blocks) == (1, 0, 0, 100)
    assert started == sum(ended)
    assert min(ended) > 0


async def test_every_request_has_exactly_one_row(stand: Stand) -> None:
    started = int(await stand.gateway.metric("octavo_gateway_requests_started_total"))

    await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) >= started)

    request_ids = [record.request_id for record in stand.telemetry.records]
    assert len(request_ids) == len(set(request_ids)) == started


# --- Another configuration: keys, tight limits, no router.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("strict")
    keys = write_keys(folder / "keys", {"sk-one": "acme", "sk-two": "globex"})
    flags = (
        *("--api-keys-file", str(keys), "--max-concurrent-requests", "2"),
        *("--sse-heartbeat-seconds", "0.1"),
    )
    async with open_stand(folder / "data", *flags, with_router=False) as stand:
        yield stand


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hurried_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """No place for answers that are to be whole: two seconds on a busy machine end them, too."""
    flags = ("--sse-heartbeat-seconds", "0.1", "--request-timeout-seconds", "2.0")
    async with open_stand(tmp_path_factory.mktemp("hurried"), *flags) as stand:
        yield stand


KEY_ONE = {"Authorization": "Bearer sk-one"}


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"),
        *("/v1/models", "/v1/models/x", "/v1/messages", "/v1/responses", "/nowhere"),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-wrong"}])
async def test_without_a_key_every_route_but_the_probes_is_closed(
    strict_stand: Stand, path: str, headers: dict[str, str]
) -> None:
    async with strict_stand.gateway.http.post(path, json=chat(), headers=headers) as response:
        error = (await response.json())["error"]

    assert response.status == 401
    assert error["type" if path == "/v1/messages" else "code"] in ("authentication_error", "invalid_api_key")
    assert response.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/metrics"])
async def test_probes_need_no_key(strict_stand: Stand, path: str) -> None:
    async with strict_stand.gateway.http.get(path) as response:
        assert response.status == 200


async def test_tenants_have_salts_of_their_own(strict_stand: Stand) -> None:
    strict_stand.engine.default_script = Script(token_ids=[5])
    for key in ("sk-one", "sk-two", "sk-one"):
        async with strict_stand.gateway.http.post(
            "/v1/chat/completions", json=chat(), headers={"Authorization": f"Bearer {key}"}
        ) as response:
            assert response.status == 200

    one, two, again = strict_stand.engine.submits[-3:]
    assert one.cache_salt == again.cache_salt != two.cache_salt
    assert (one.tenant_id, two.tenant_id) == ("acme", "globex")


async def test_silence_is_filled_with_comments_that_clients_ignore(strict_stand: Stand) -> None:
    token_ids = strict_stand.encode(TEXT)
    first, last = asyncio.Event(), asyncio.Event()
    strict_stand.engine.default_script = Script(
        token_ids=token_ids, first_step_after=first, last_step_after=last, tokens_per_step=len(token_ids) - 1
    )

    async with strict_stand.gateway.http.post(
        "/v1/chat/completions", json=chat(stream=True), headers=KEY_ONE
    ) as response:
        silence = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        first.set()
        begun = b""
        while b"data: " not in begun or not begun.endswith(b": ping\n\n"):
            begun += await response.content.readuntil(b"\n\n")
        last.set()
        raw = b"".join(silence) + begun + await response.read()

    assert silence == [b": ping\n\n"] * 2
    assert text_of(events_of(raw)) == TEXT


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_the_deadline_ends_a_stream_that_began_with_an_event(hurried_stand: Stand, num_tokens: int) -> None:
    hurried_stand.engine.default_script = Script(token_ids=[5, 6][:num_tokens], hangs=True)

    async with hurried_stand.gateway.http.post("/v1/chat/completions", json=chat(stream=True)) as response:
        raw, request_id = await response.read(), response.headers["X-Octavo-Request-Id"]
    record = await hurried_stand.telemetry.wait_for(request_id)

    assert events_of(raw)[-1]["error"]["code"] == "deadline_exceeded"
    assert record.error_reason == "DEADLINE_EXCEEDED"
    assert request_id in hurried_stand.engine.aborted_ids


async def test_the_deadline_of_a_whole_answer_is_504(hurried_stand: Stand) -> None:
    hurried_stand.engine.default_script = Script(token_ids=[5], hangs=True)

    async with hurried_stand.gateway.http.post("/v1/chat/completions", json=chat()) as response:
        body = await response.json()

    assert (response.status, body["error"]["code"]) == (504, "deadline_exceeded")


async def test_too_many_requests_at_once_are_refused_with_a_time_to_come_back(strict_stand: Stand) -> None:
    strict_stand.engine.default_script = Script(hangs=True)
    num_submits = len(strict_stand.engine.submits)

    async def ask() -> tuple[int, str | None]:
        async with strict_stand.gateway.http.post("/v1/chat/completions", json=chat(), headers=KEY_ONE) as response:
            await response.read()
            return response.status, response.headers.get("Retry-After")

    running = [asyncio.create_task(ask()) for _ in range(2)]
    await strict_stand.engine.wait_until(lambda: len(strict_stand.engine.submits) == num_submits + 2)
    refused = await ask()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    # Their places must be free again for whoever comes next.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await strict_stand.gateway.metric("octavo_gateway_requests_in_flight"):
            await asyncio.sleep(0.01)

    assert refused == (503, "1")


async def test_without_a_router_the_gateway_places_requests_itself(strict_stand: Stand) -> None:
    strict_stand.engine.default_script = Script(token_ids=strict_stand.encode(TEXT))

    async with strict_stand.gateway.http.post("/v1/chat/completions", json=chat(), headers=KEY_ONE) as response:
        body = await response.json()

    assert body["choices"][0]["message"]["content"] == TEXT
    assert strict_stand.router.enqueues == []


# --- The life of the process.


async def test_sigterm_lets_streams_finish_refuses_new_ones_and_flushes(tmp_path: Path) -> None:
    async with open_stand(tmp_path) as stand:
        token_ids = stand.encode(TEXT)
        was_refused = asyncio.Event()
        stand.engine.default_script = Script(token_ids=token_ids, last_step_after=was_refused)
        streams = [asyncio.create_task(post_and_read(stand, stream=True)) for _ in range(5)]
        await stand.engine.wait_until(lambda: len(stand.engine.submits) == 5)

        stand.gateway.terminate()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                async with stand.gateway.http.get("/readyz") as response:
                    if response.status == 503:
                        break
        status, body, headers = await post(stand)
        was_refused.set()
        raws = await asyncio.gather(*streams)
        exit_code = await stand.gateway.wait_exit()

        assert [text_of(events_of(raw)) for raw in raws] == [TEXT] * 5
        assert (status, body["error"]["code"]) == (503, "draining")
        assert "Retry-After" in headers
        assert exit_code == 0
        assert len(stand.telemetry.records) == 6


async def test_a_drain_that_takes_too_long_ends_streams_with_an_event(tmp_path: Path) -> None:
    async with open_stand(tmp_path, "--drain-timeout-seconds", "0.2") as stand:
        stand.engine.default_script = Script(token_ids=[5], hangs=True)
        streaming = asyncio.create_task(post_and_read(stand, stream=True))
        await stand.engine.wait_until(lambda: len(stand.engine.submits) == 1)
        waiting = asyncio.create_task(post(stand))
        await stand.engine.wait_until(lambda: len(stand.engine.submits) == 2)
        await stand.until_all_is_taken()

        stand.gateway.terminate()
        raw = await streaming
        status, body, _ = await waiting
        exit_code = await stand.gateway.wait_exit()

        assert events_of(raw)[-1]["error"]["code"] == "draining"
        assert b"[DONE]" not in raw
        assert (status, body["error"]["code"]) == (503, "draining")
        assert exit_code == 0
        reasons = [record.error_reason for record in stand.telemetry.records if record.error_reason]
        assert reasons == ["DRAINING"] * 2
        assert len(stand.engine.aborted_ids) == 2


async def test_requests_of_a_killed_gateway_are_closed_as_lost_by_the_next(tmp_path: Path) -> None:
    async with open_stand(tmp_path) as stand:
        stand.engine.default_script = Script(token_ids=[5])
        await post(stand)
        stand.engine.default_script = Script(token_ids=[5], hangs=True)
        lost = [asyncio.create_task(post_and_read(stand, stream=True)) for _ in range(3)]
        await stand.engine.wait_until(lambda: len(stand.engine.submits) == 4)
        await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) == 1)

        stand.gateway.kill()
        await stand.gateway.wait_exit()
        await asyncio.gather(*lost, return_exceptions=True)
        await stand.engine.wait_until(lambda: not stand.engine.running_ids)
        async with run_gateway(
            tmp_path,
            *("--telemetry-address", stand.telemetry.address, "--router-address", stand.router.address),
        ):
            await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) >= 4)

    statuses = [record.status for record in stand.telemetry.records]
    assert statuses.count(telemetry_pb2.REQUEST_STATUS_STOP) == 1
    assert statuses.count(telemetry_pb2.REQUEST_STATUS_GATEWAY_LOST) == 3
    assert {record.request_id for record in stand.telemetry.records} == {
        submit.request_id for submit in stand.engine.submits
    }


async def test_a_gateway_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, services.gateway.main\n"
        "print(sorted({'torch', 'transformers', 'llama_cpp', 'chdb', 'redis'} & set(sys.modules)))"
    )

    process = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)

    assert process.stdout.strip() == "[]", process.stderr


async def test_a_gateway_that_strangers_could_reach_does_not_start_without_keys() -> None:
    process = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "services.cli", "gateway", "--host", "0.0.0.0", "--port", "0"],
        capture_output=True,
        text=True,
    )

    assert process.returncode == 2
    assert "gateway.api_keys_file" in process.stderr
