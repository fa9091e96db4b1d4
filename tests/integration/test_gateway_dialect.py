"""OpenAI's dialect as vLLM has widened it, over HTTP to a real gateway process between fakes of the other tiers."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from yarl import URL

from libs.errors import InternalError, InvalidLogits, WorkerLost
from libs.protogen.telemetry.v1 import telemetry_pb2
from tests.fakes.fake_generation_engine import Script, alternatives_of, logprob_of
from tests.integration.gateway_process import MODEL_NAME, Stand, events_of, open_stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = 2
ALIASES = ["meta-llama/Llama-3-70b-instruct", "gpt-4o"]
TURNS = [{"role": "user", "content": "Say hi"}, {"role": "assistant", "content": "Sure: "}]
# A stream that fails ends its connection, so a test that follows must not use it.
ONCE = {"Connection": "close"}
WITH_USAGE = {"stream_options": {"include_usage": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    async with open_stand(tmp_path_factory.mktemp("dialect"), "--model-aliases", ",".join(ALIASES)) as stand:
        yield stand


@pytest.fixture
def stand(shared_stand: Stand) -> Stand:
    """The shared stand with an engine whose choices differ."""
    engine = shared_stand.engine
    engine.scripts.clear()
    engine.default_script = Script(
        token_ids=[*shared_stand.encode("One two."), EOS],
        ends_with_stop_token=True,
        num_cached_tokens=16,
        other_choices=(
            Script(token_ids=shared_stand.encode("Three 😀 four five six"), reason=LENGTH, num_cached_tokens=32),
            Script(token_ids=[*shared_stand.encode("Seven"), EOS], ends_with_stop_token=True),
        ),
    )
    return shared_stand


LENGTH = 2  # FINISH_REASON_LENGTH
CHOICES = [("One two.", "stop"), ("Three 😀 four five six", "length"), ("Seven", "stop")]


async def post(stand: Stand, path: str, **fields: Any) -> tuple[int, Any, str]:
    async with stand.gateway.http.post(path, json={"model": MODEL_NAME} | fields) as response:
        return response.status, await response.json(), response.headers["X-Octavo-Request-Id"]


async def chat(stand: Stand, **fields: Any) -> tuple[int, Any, str]:
    messages = [{"role": "user", "content": "Count."}]
    return await post(stand, "/v1/chat/completions", **({"messages": messages} | fields))


async def chat_events(stand: Stand, **fields: Any) -> tuple[list[Any], str]:
    messages = [{"role": "user", "content": "Count."}]
    body = {"model": MODEL_NAME, "messages": messages, "stream": True} | fields
    async with stand.gateway.http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        return events_of(await response.read()), response.headers["X-Octavo-Request-Id"]


def choices_of(events: list[Any]) -> dict[int, list[dict[str, Any]]]:
    """The choices of a stream's chunks by their index."""
    found: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if isinstance(event, dict):
            for choice in event.get("choices", ()):
                found.setdefault(choice["index"], []).append(choice)
    return found


async def test_every_route_is_in_the_openapi_document_and_every_one_there_is_a_route(stand: Stand) -> None:
    async with stand.gateway.http.get("/openapi.json") as response:
        paths = (await response.json())["paths"]

    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= paths.keys()
    for path, operations in paths.items():
        for method in operations:
            url = path.replace("{model_id}", MODEL_NAME)
            async with stand.gateway.http.request(method, url, json={} if method == "post" else None) as response:
                assert response.status == (400 if method == "post" else 200), path


# --- Several choices.


async def test_several_choices_are_one_request_with_one_row(stand: Stand) -> None:
    status, body, request_id = await chat(stand, n=3, seed=7)
    record = await stand.telemetry.wait_for(request_id)

    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [(choice["message"]["content"], choice["finish_reason"]) for choice in body["choices"]] == CHOICES
    num_tokens = sum(len(stand.encode(text)) for text, _ in CHOICES) + 2
    submit = stand.engine.submits[-1]
    # The prompt is counted and cached once, whatever the number of choices.
    assert body["usage"] == {
        "prompt_tokens": len(submit.prompt_token_ids),
        "completion_tokens": num_tokens,
        "total_tokens": len(submit.prompt_token_ids) + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert (len(submit.choices), submit.sampling_params.seed) == (3, 7)
    assert record.status == telemetry_pb2.REQUEST_STATUS_LENGTH
    assert (record.prompt_tokens, record.completion_tokens) == (len(submit.prompt_token_ids), num_tokens)
    assert (record.cached_tokens, record.discarded_tokens) == (16, 0)


async def test_streamed_choices_concatenate_to_the_whole_ones(stand: Stand) -> None:
    events, _ = await chat_events(stand, n=3, **WITH_USAGE)
    _, body, _ = await chat(stand, n=3)

    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    assert events[-2]["usage"] == body["usage"]
    found = choices_of(events)
    assert sorted(found) == [0, 1, 2]
    for index, chunks in found.items():
        assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in chunk["delta"] for chunk in chunks) == 1
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert (text, chunks[-1]["finish_reason"]) == CHOICES[index]
        assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_a_stop_string_ends_one_choice_and_the_others_go_on(stand: Stand) -> None:
    endless = Script(token_ids=stand.encode("a b STOP c d"), hangs=True)
    slow = Script(token_ids=stand.encode("x y z"), step_delay_seconds=0.05)
    stand.engine.default_script = Script(
        token_ids=endless.token_ids, hangs=True, num_cached_tokens=8, other_choices=(slow,)
    )

    status, body, request_id = await chat(stand, n=2, stop=["STOP"])
    record = await stand.telemetry.wait_for(request_id)

    assert status == 200
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a b ", "x y z"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert (request_id, 1) in stand.engine.partly_aborted
    assert request_id not in stand.engine.aborted_ids
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    num_taken = 3 + len(stand.encode("x y z")) + len(stand.encode(" STOP")) - 1
    assert record.completion_tokens == body["usage"]["completion_tokens"] == num_taken
    assert record.discarded_tokens == len(endless.token_ids) + len(slow.token_ids) - num_taken


async def test_a_choice_that_fails_ends_the_request(stand: Stand) -> None:
    stand.engine.default_script = Script(
        token_ids=stand.encode("a b c"),
        hangs=True,
        other_choices=(Script(token_ids=[5], error=InvalidLogits("NaN")),),
    )

    status, body, request_id = await chat(stand, n=2)
    record = await stand.telemetry.wait_for(request_id)

    assert (status, body["error"]["type"]) == (500, "server_error")
    assert request_id in stand.engine.aborted_ids
    assert record.status == telemetry_pb2.REQUEST_STATUS_ERROR
    assert not stand.engine.running_ids


async def test_a_lost_worker_before_any_token_is_invisible_for_all_choices(stand: Stand) -> None:
    failing = Script(error=WorkerLost("gone"))
    stand.engine.scripts.append(Script(error=WorkerLost("gone"), other_choices=(failing, failing)))

    status, body, _ = await chat(stand, n=3)

    assert status == 200
    assert [choice["message"]["content"] for choice in body["choices"]] == [text for text, _ in CHOICES]


async def test_an_engine_that_fails_ends_all_choices_with_one_event(stand: Stand) -> None:
    failing = Script(token_ids=stand.encode("a b"), step_delay_seconds=0.02, error=InternalError("Broken."))
    stand.engine.default_script = Script(token_ids=stand.encode("c d"), hangs=True, other_choices=(failing,))
    body = {"model": MODEL_NAME, "messages": TURNS, "stream": True, "n": 2}

    async with stand.gateway.http.post("/v1/chat/completions", json=body, headers=ONCE) as response:
        events = events_of(await response.read())

    assert events[-1]["error"]["code"] == "internal_error"
    for index, text in enumerate(("c d", "a b")):
        chunks = choices_of(events[:-1])[index]
        assert [chunk["delta"].get("role") for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        assert text.startswith("".join(chunk["delta"].get("content", "") for chunk in chunks))
        assert not any(chunk["finish_reason"] for chunk in chunks)


async def test_a_client_that_leaves_ends_all_choices(stand: Stand) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b"), hangs=True)
    num_submits = len(stand.engine.submits)

    leaving = asyncio.create_task(chat_events(stand, n=4))
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits)
    request_id = stand.engine.submits[-1].request_id
    await stand.until_all_is_taken()
    leaving.cancel()
    await stand.engine.wait_until(lambda: request_id in stand.engine.aborted_ids)
    record = await stand.telemetry.wait_for(request_id)

    assert record.status == telemetry_pb2.REQUEST_STATUS_ABORTED
    assert record.completion_tokens == 4 * len(stand.encode("a b"))
    assert not stand.engine.running_ids


# --- Fields that reach the engine, and fields that shape the answer.


async def test_what_changes_the_draw_reaches_the_engine(stand: Stand) -> None:
    status, _, _ = await chat(
        stand,
        presence_penalty=0.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={"17": 5, "18": -100},
        allowed_token_ids=[17, 18, 19],
        bad_words=["cat"],
        priority=-3,
    )

    submit = stand.engine.submits[-1]
    params = submit.sampling_params
    assert status == 200
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1.5, 1.25)
    assert dict(params.logit_bias) == {17: 5.0, 18: -100.0}
    assert list(params.allowed_token_ids) == [17, 18, 19]
    assert [list(word.token_ids) for word in params.bad_words] == [stand.encode("cat"), stand.encode(" cat")]
    assert submit.priority == stand.router.enqueues[-1].priority == 3


async def test_what_is_not_asked_for_is_not_sent(stand: Stand) -> None:
    await chat(stand)

    submit = stand.engine.submits[-1]
    assert not submit.sampling_params.HasField("repetition_penalty")
    assert not submit.sampling_params.logit_bias
    assert (len(submit.choices), submit.priority) == (1, 0)


async def test_the_stop_string_and_special_tokens_are_shown_where_they_are_asked_for(stand: Stand) -> None:
    stand.engine.default_script = Script(
        token_ids=[*stand.encode("one"), 1, *stand.encode(" two three"), EOS], ends_with_stop_token=True
    )

    async def text(**fields: Any) -> str:
        _, body, _ = await chat(stand, **fields)
        return str(body["choices"][0]["message"]["content"])

    assert await text(stop=" three") == "one two"
    assert await text(stop=" three", include_stop_str_in_output=True) == "one two three"
    assert await text(skip_special_tokens=False) == "one<|im_start|> two three"
    assert (
        await text(skip_special_tokens=False, include_stop_str_in_output=True)
        == "one<|im_start|> two three<|im_end|>"
    )


@pytest.mark.parametrize("echo", [False, True])
async def test_a_message_is_continued_and_echoed_only_where_that_is_asked_for(stand: Stand, echo: bool) -> None:
    fields: dict[str, Any] = {"messages": TURNS, "continue_final_message": True, "echo": echo}

    _, body, _ = await chat(stand, **fields)
    events, _ = await chat_events(stand, **fields)

    ids = list(stand.engine.submits[-1].prompt_token_ids)
    shown = b"".join(map(stand.model_text.tokenizer.token_bytes, ids)).decode()
    assert shown.endswith("<|im_start|>assistant\nSure: ")
    assert body["usage"]["prompt_tokens"] == len(ids)
    expected = ("Sure: " if echo else "") + "One two."
    assert body["choices"][0]["message"]["content"] == expected
    assert "".join(chunk["delta"].get("content", "") for chunk in choices_of(events)[0]) == expected


async def test_both_ways_to_begin_an_answer_are_refused_together(stand: Stand) -> None:
    status, body, _ = await chat(stand, messages=TURNS, continue_final_message=True, add_generation_prompt=True)

    assert (status, body["error"]["param"]) == (400, "continue_final_message")


async def test_a_prompt_is_cut_to_its_end(stand: Stand) -> None:
    long = [{"role": "user", "content": "a " * 9000}]

    status, body, _ = await chat(stand, messages=long, truncate_prompt_tokens=100)
    fitting_status, fitting, _ = await chat(stand, messages=long, truncate_prompt_tokens=-1, max_tokens=20)

    assert (status, body["usage"]["prompt_tokens"]) == (200, 100)
    assert (fitting_status, fitting["usage"]["prompt_tokens"]) == (200, 8192 - 20)


async def test_token_ids_are_returned_streamed_and_whole(stand: Stand) -> None:
    _, body, _ = await chat(stand, n=2, return_token_ids=True)
    events, _ = await chat_events(stand, n=2, return_token_ids=True)

    prompt_token_ids = list(stand.engine.submits[-1].prompt_token_ids)
    wanted = [[*stand.encode("One two."), EOS], stand.encode("Three 😀 four five six")]
    assert body["prompt_token_ids"] == prompt_token_ids
    assert [choice["token_ids"] for choice in body["choices"]] == wanted
    assert events[0]["prompt_token_ids"] == prompt_token_ids
    for index, chunks in choices_of(events).items():
        ids = itertools.chain.from_iterable(chunk.get("token_ids") or () for chunk in chunks)
        assert list(ids) == wanted[index]


async def test_usage_can_be_told_all_along(stand: Stand) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    events, _ = await chat_events(stand, stream_options=options)

    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(stand.encode("One two.")) + 1
    assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {events[-2]["usage"]["prompt_tokens"]}


# --- Plain completions.


async def complete(stand: Stand, prompt: Any, **fields: Any) -> tuple[int, Any, str]:
    return await post(stand, "/v1/completions", prompt=prompt, **fields)


async def complete_events(stand: Stand, prompt: Any, **fields: Any) -> list[Any]:
    body = {"model": MODEL_NAME, "prompt": prompt, "stream": True} | fields
    async with stand.gateway.http.post("/v1/completions", json=body) as response:
        assert response.status == 200
        return events_of(await response.read())


def texts_of(events: list[Any]) -> dict[int, tuple[str, str | None]]:
    """The text and the reason of each choice of a stream."""
    return {
        index: ("".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"])
        for index, chunks in choices_of(events).items()
    }


async def test_a_completion_has_openais_shape(stand: Stand) -> None:
    status, body, request_id = await complete(stand, "One")

    submit = stand.engine.submits[-1]
    assert status == 200
    assert body == {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": body["created"],
        "model": MODEL_NAME,
        "choices": [{"text": "One two.", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": len(stand.encode("One two.")) + 1,
            "total_tokens": len(stand.encode("One two.")) + 2,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }
    assert list(submit.prompt_token_ids) == stand.encode("One")
    # OpenAI's limit where a plain prompt comes without one.
    assert submit.sampling_params.max_output_tokens == 16


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_several_prompts_have_their_choices_in_order_and_a_row_each(stand: Stand, is_streaming: bool) -> None:
    prompts = ["One", "Two words", "Three words here"]
    num_submits = len(stand.engine.submits)

    if is_streaming:
        events = await complete_events(stand, prompts, n=2, **WITH_USAGE)
        texts, usage = texts_of(events), events[-2]["usage"]
    else:
        _, body, _ = await complete(stand, prompts, n=2)
        texts = {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in body["choices"]}
        usage = body["usage"]

    submits = stand.engine.submits[num_submits:]
    rows = [await stand.telemetry.wait_for(submit.request_id) for submit in submits]
    assert texts == {index: CHOICES[index % 2] for index in range(6)}
    assert {tuple(submit.prompt_token_ids) for submit in submits} == {tuple(stand.encode(text)) for text in prompts}
    assert len({submit.request_id for submit in submits}) == 3
    assert len({submit.sampling_params.seed for submit in submits}) == 3
    num_tokens = sum(len(stand.encode(text)) for text, _ in CHOICES[:2]) + 1
    assert usage["prompt_tokens"] == sum(row.prompt_tokens for row in rows) == 1 + 2 + 3
    assert usage["completion_tokens"] == sum(row.completion_tokens for row in rows) == 3 * num_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == sum(row.cached_tokens for row in rows) == 48
    assert {row.endpoint for row in rows} == {"/v1/completions"}
    assert {row.status for row in rows} == {telemetry_pb2.REQUEST_STATUS_LENGTH}


async def test_token_ids_are_prompts(stand: Stand) -> None:
    await complete(stand, [5, 6, 7])
    one = [list(submit.prompt_token_ids) for submit in stand.engine.submits[-1:]]
    await complete(stand, [[5, 6], [7]])
    two = sorted(list(submit.prompt_token_ids) for submit in stand.engine.submits[-2:])

    assert (one, two) == ([[5, 6, 7]], [[5, 6], [7]])


@pytest.mark.parametrize("prompt", ["Count: 😀 one", [[40, 41, 42]]])
async def test_an_echo_comes_before_the_answer_streamed_and_whole(stand: Stand, prompt: Any) -> None:
    shown = (
        prompt
        if isinstance(prompt, str)
        else b"".join(map(stand.model_text.tokenizer.token_bytes, prompt[0])).decode()
    )

    _, body, _ = await complete(stand, prompt, echo=True, n=2)
    events = await complete_events(stand, prompt, echo=True, n=2)

    expected = {index: (shown + text, reason) for index, (text, reason) in enumerate(CHOICES[:2])}
    assert {c["index"]: (c["text"], c["finish_reason"]) for c in body["choices"]} == expected
    assert texts_of(events) == expected


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_the_prompt_alone_costs_no_output(stand: Stand, is_streaming: bool) -> None:
    if is_streaming:
        events = await complete_events(stand, "One two", echo=True, max_tokens=0, **WITH_USAGE)
        texts, usage = texts_of(events), events[-2]["usage"]
    else:
        _, body, _ = await complete(stand, "One two", echo=True, max_tokens=0)
        texts = {choice["index"]: (choice["text"], choice["finish_reason"]) for choice in body["choices"]}
        usage = body["usage"]
    submit = stand.engine.submits[-1]
    record = await stand.telemetry.wait_for(submit.request_id)

    assert texts == {0: ("One two", "length")}
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, 2)
    # An engine computes at least one token.
    assert submit.sampling_params.max_output_tokens == 1
    assert (record.completion_tokens, record.discarded_tokens) == (0, 1)
    assert record.status == telemetry_pb2.REQUEST_STATUS_LENGTH


async def test_a_prompt_that_cannot_be_served_refuses_all_of_them(stand: Stand) -> None:
    num_submits = len(stand.engine.submits)

    status, body, request_id = await complete(stand, ["One", "a " * 9000], stream=True)
    record = await stand.telemetry.wait_for(request_id)

    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert len(stand.engine.submits) == num_submits
    other = await stand.telemetry.wait_for(str(uuid.uuid5(uuid.UUID(request_id), "prompt-1")))
    assert record.status == other.status == telemetry_pb2.REQUEST_STATUS_REJECTED
    assert (record.prompt_tokens, other.prompt_tokens) == (1, len(stand.encode("a " * 9000)))


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_prompt_that_fails_ends_the_others(stand: Stand, is_streaming: bool) -> None:
    stand.engine.scripts.extend(
        [
            Script(token_ids=stand.encode("a b"), hangs=True),
            Script(token_ids=[5], first_delay_seconds=0.2, error=InvalidLogits("NaN in the logits")),
            Script(first_delay_seconds=60),
        ]
    )
    num_submits = len(stand.engine.submits)
    body = {"model": MODEL_NAME, "prompt": ["a", "b", "c"], "stream": is_streaming}

    async with stand.gateway.http.post("/v1/completions", json=body, headers=ONCE) as response:
        raw, status = await response.read(), response.status
    submits = stand.engine.submits[num_submits:]
    rows = [await stand.telemetry.wait_for(submit.request_id) for submit in submits]

    assert len(rows) == 3
    assert b"NaN in the logits" in raw
    assert b"[DONE]" not in raw
    assert status == (200 if is_streaming else 500)
    assert {row.status for row in rows} == {telemetry_pb2.REQUEST_STATUS_ERROR}
    assert not stand.engine.running_ids


async def test_a_client_that_leaves_ends_all_prompts(stand: Stand) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("a b"), hangs=True)
    num_submits = len(stand.engine.submits)

    leaving = asyncio.create_task(complete_events(stand, ["a", "b", "c"]))
    await stand.engine.wait_until(lambda: len(stand.engine.submits) == num_submits + 3)
    request_ids = [submit.request_id for submit in stand.engine.submits[num_submits:]]
    leaving.cancel()
    await stand.engine.wait_until(lambda: set(request_ids) <= set(stand.engine.aborted_ids))
    rows = [await stand.telemetry.wait_for(request_id) for request_id in request_ids]

    assert {row.status for row in rows} == {telemetry_pb2.REQUEST_STATUS_ABORTED}
    assert not stand.engine.running_ids


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ["x"] * 100_000}, "prompt", None),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": [49152]}, "prompt", None),
        ({"prompt": "x", "n": 100_000}, "n", None),
        ({"prompt": "x", "best_of": 10**6}, "best_of", "unsupported_field"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "unsupported_field"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", None),
        ({"prompt": "x", "logprobs": 49152}, "logprobs", None),
        ({"prompt": "x", "stop": ["x"] * 100_000}, "stop", None),
        ({"prompt": "x", "temperature": 1e6}, "temperature", None),
        ({"prompt": "x", "max_tokens": 10**9}, "prompt", "context_length_exceeded"),
        ({"prompt": "x", "max_tokens": 10**9, "stream": True}, "prompt", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_wrong_completion_is_refused_by_name(
    stand: Stand, fields: dict[str, Any], param: str, code: str | None
) -> None:
    status, body, _ = await post(stand, "/v1/completions", **fields)

    assert (status, body["error"]["param"], body["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..%2f..%2f", "/etc/passwd", "C:\\x", "a\u0000b", "x" * 10_240]
)
async def test_a_name_that_is_a_path_is_only_a_name(stand: Stand, path: str, name: str) -> None:
    status, body, _ = await post(stand, path, model=name, prompt="x")

    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert len(body["error"]["message"]) < 200


# --- Log-probabilities.


def entry_of(stand: Stand, token_id: int, logprob: float) -> dict[str, Any]:
    token_bytes = stand.model_text.tokenizer.token_bytes(token_id)
    return {"token": token_bytes.decode(errors="replace"), "logprob": logprob, "bytes": list(token_bytes)}


def content_of(stand: Stand, token_ids: list[int], count: int) -> list[dict[str, Any]]:
    """A chat's entries for tokens, as the fake engine measures them."""
    return [
        entry_of(stand, token_id, logprob_of(token_id))
        | {"top_logprobs": [entry_of(stand, *alternative) for alternative in alternatives_of(token_id, count)]}
        for token_id in token_ids
    ]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 0),
        ({"top_logprobs": 0}, 0),
        ({"top_logprobs": None}, 0),
        ({"top_logprobs": 2}, 2),
        ({"top_logprobs": 20}, 20),
    ],
    ids=str,
)
async def test_every_token_of_a_chat_has_its_log_probability(
    stand: Stand, fields: dict[str, Any], count: int
) -> None:
    _, body, _ = await chat(stand, n=2, logprobs=True, **fields)
    events, _ = await chat_events(stand, n=2, logprobs=True, **fields)

    first = content_of(stand, [*stand.encode("One two."), EOS], count)
    second = content_of(stand, stand.encode("Three 😀 four five six"), count)
    assert [choice["logprobs"]["content"] for choice in body["choices"]] == [first, second]
    assert len(first) + len(second) == body["usage"]["completion_tokens"]
    for index, chunks in choices_of(events).items():
        parts = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
        assert list(itertools.chain.from_iterable(parts)) == [first, second][index]
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert text == CHOICES[index][0]


async def test_what_is_not_asked_for_has_no_log_probabilities(stand: Stand) -> None:
    _, body, _ = await chat(stand, logprobs=False)
    events, _ = await chat_events(stand)

    assert body["choices"][0]["logprobs"] is None
    assert not stand.engine.submits[-1].sampling_params.HasField("num_logprobs")
    assert {chunk["logprobs"] for chunk in choices_of(events)[0]} == {None}


@pytest.mark.parametrize("fields", [{"logprobs": False, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}])
async def test_wrong_log_probabilities_are_refused(stand: Stand, fields: dict[str, Any]) -> None:
    status, body, _ = await chat(stand, **fields)

    assert (status, body["error"]["param"]) == (400, "top_logprobs")


@pytest.mark.parametrize("tokens_per_step", [1, 2, 7])
async def test_log_probabilities_end_with_the_stop_string_streamed_and_whole(
    stand: Stand, tokens_per_step: int
) -> None:
    token_ids = stand.encode("ha 😀 ha <<END>> ha ha")
    stand.engine.default_script = Script(token_ids=token_ids, tokens_per_step=tokens_per_step, hangs=True)
    fields: dict[str, Any] = {"stop": "<<END>>", "logprobs": True, "top_logprobs": 1, "return_token_ids": True}

    _, body, _ = await chat(stand, **fields)
    events, _ = await chat_events(stand, **fields, **WITH_USAGE)

    (choice,) = body["choices"]
    chunks = choices_of(events)[0]
    num_tokens = body["usage"]["completion_tokens"]
    assert choice["message"]["content"] == "ha 😀 ha "
    assert choice["token_ids"] == token_ids[:num_tokens]
    assert choice["logprobs"]["content"] == content_of(stand, token_ids[:num_tokens], 1)
    streamed = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    assert list(itertools.chain.from_iterable(streamed)) == choice["logprobs"]["content"]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "ha 😀 ha "
    assert events[-2]["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_prompt_is_scored_as_harnesses_ask_for_it(
    stand: Stand, max_tokens: int, is_streaming: bool
) -> None:
    """The requests of lm-evaluation-harness: token ids in a batch, echo, logprobs 1."""
    texts = ["One two 😀 three", " four"]
    prompts = [stand.encode(text) for text in texts]
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1234}

    if is_streaming:
        found = choices_of(await complete_events(stand, prompts, **fields))
        answers = [
            {
                name: list(itertools.chain.from_iterable(c["logprobs"][name] for c in chunks if c["logprobs"]))
                for name in NAMES
            }
            for _, chunks in sorted(found.items())
        ]
        shown = ["".join(chunk["text"] for chunk in chunks) for _, chunks in sorted(found.items())]
    else:
        _, body, _ = await complete(stand, prompts, **fields)
        answers = [choice["logprobs"] for choice in body["choices"]]
        shown = [choice["text"] for choice in body["choices"]]

    generated = stand.encode("One two.")[:max_tokens]
    for text, prompt, answer, whole in zip(texts, prompts, answers, shown, strict=True):
        token_ids = [*prompt, *generated]
        assert whole == text + ("One" if generated else "")
        assert set(answer) == set(NAMES)
        assert {len(values) for values in answer.values()} == {len(token_ids)}
        assert answer["token_logprobs"] == [None, *map(logprob_of, token_ids[1:])]
        assert answer["top_logprobs"][0] is None
        for token_id, name, alternatives in zip(
            token_ids[1:], answer["tokens"][1:], answer["top_logprobs"][1:], strict=True
        ):
            assert alternatives[name] == logprob_of(token_id)
            assert max(alternatives.values()) == -1 / 64
        assert answer["text_offset"][0] == 0
        assert answer["text_offset"] == sorted(answer["text_offset"])
        if generated:
            assert answer["text_offset"][-1] == len(text)


NAMES = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_a_completions_log_probabilities_have_openais_shape(stand: Stand, count: int) -> None:
    _, body, _ = await complete(stand, "x", logprobs=count)

    token_ids = [*stand.encode("One two."), EOS]
    found = body["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [logprob_of(token_id) for token_id in token_ids]
    assert found["tokens"] == ["One", " two", ".", "<|im_end|>"]
    assert found["text_offset"] == [0, 3, 7, 8]
    assert {len(alternatives) for alternatives in found["top_logprobs"]} == {count + 1}
    assert (await complete(stand, "x"))[1]["choices"][0]["logprobs"] is None


async def test_log_probabilities_of_a_prompt_have_vllms_shape(stand: Stand) -> None:
    prompt = stand.encode("One two three")

    _, chat_body, _ = await chat(stand, prompt_logprobs=1)
    chat_prompt = list(stand.engine.submits[-1].prompt_token_ids)
    _, body, _ = await complete(stand, prompt, prompt_logprobs=2, n=2, max_tokens=0)
    _, one, _ = await complete(stand, prompt[:1], prompt_logprobs=2)

    assert len(chat_body["prompt_logprobs"]) == len(chat_prompt)
    for choice in body["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for token_id, entry in zip(prompt[1:], others, strict=True):
            assert {int(key): value["logprob"] for key, value in entry.items()} == {
                token_id: logprob_of(token_id)
            } | dict(alternatives_of(token_id, 2))
            assert entry[str(token_id)]["rank"] == token_id % 9 + 1
    assert one["choices"][0]["prompt_logprobs"] == [None]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_a_long_prompt_is_scored_whole(stand: Stand, is_streaming: bool) -> None:
    prompt = [1000 + index % 500 for index in range(8000)]
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0}

    if is_streaming:
        chunks = choices_of(await complete_events(stand, prompt, **fields))[0]
        scores = [*itertools.chain.from_iterable(c["logprobs"]["token_logprobs"] for c in chunks if c["logprobs"])]
    else:
        _, body, _ = await complete(stand, prompt, **fields)
        scores = body["choices"][0]["logprobs"]["token_logprobs"]

    assert scores == [None, *map(logprob_of, prompt[1:])]


async def test_a_prompt_that_is_computed_again_elsewhere_is_scored_once(stand: Stand) -> None:
    stand.engine.scripts.append(Script(error=WorkerLost("gone")))
    prompt = [1000 + index for index in range(40)]

    status, body, _ = await complete(stand, prompt, echo=True, logprobs=1, max_tokens=1)

    assert status == 200
    scores = body["choices"][0]["logprobs"]["token_logprobs"]
    assert scores == [None, *map(logprob_of, [*prompt[1:], stand.encode("One")[0]])]


async def test_more_log_probabilities_than_are_kept_are_refused(stand: Stand) -> None:
    num_submits = len(stand.engine.submits)

    status, body, _ = await chat(stand, n=128, logprobs=True, top_logprobs=20)
    smaller_status, _, _ = await chat(stand, n=128, logprobs=True, top_logprobs=20, max_tokens=10)

    assert (status, body["error"]["param"]) == (400, "logprobs")
    assert smaller_status == 200
    assert len(stand.engine.submits) == num_submits + 1


async def test_a_part_of_a_character_is_valid_json_with_its_own_bytes(stand: Stand) -> None:
    first, *_ = stand.encode("🦜")
    stand.engine.default_script = Script(token_ids=[first])
    token_bytes = list(stand.model_text.tokenizer.token_bytes(first))

    _, body, _ = await chat(stand, logprobs=True, max_tokens=1)
    events, _ = await chat_events(stand, logprobs=True, max_tokens=1)

    assert body["choices"][0]["message"]["content"] == "\ufffd"
    assert body["choices"][0]["logprobs"]["content"][0]["bytes"] == token_bytes
    chunks = choices_of(events)[0]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "\ufffd"
    assert [chunk["logprobs"]["content"][0]["bytes"] for chunk in chunks if chunk["logprobs"]] == [token_bytes]


# --- Tokens and models.


async def test_a_conversation_has_the_tokens_that_its_answer_is_made_from(stand: Stand) -> None:
    _, body, _ = await chat(stand, messages=TURNS, continue_final_message=True)

    status, tokens, _ = await post(stand, "/tokenize", messages=TURNS, continue_final_message=True)
    _, whole, _ = await post(stand, "/tokenize", messages=TURNS)
    _, closed, _ = await post(stand, "/tokenize", messages=TURNS, add_generation_prompt=False)

    assert status == 200
    assert tokens == {
        "count": body["usage"]["prompt_tokens"],
        "max_model_len": 8192,
        "tokens": list(stand.engine.submits[-1].prompt_token_ids),
        "token_strs": None,
    }
    assert tokens["count"] < closed["count"] < whole["count"]


async def test_plain_text_goes_to_tokens_and_back(stand: Stand) -> None:
    text = "One 😀\n<|im_start|>two"

    _, tokens, _ = await post(stand, "/tokenize", prompt=text, return_token_strs=True, model=None)
    _, back, _ = await post(stand, "/detokenize", tokens=tokens["tokens"])
    _, empty, _ = await post(stand, "/tokenize", prompt="", add_special_tokens=False)
    _, nothing, _ = await post(stand, "/detokenize", tokens=[])

    assert back == {"prompt": text}
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert "<|im_start|>" in tokens["token_strs"]
    assert (empty["count"], empty["tokens"], nothing["prompt"]) == (0, [], "")


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": TURNS}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "temperature": 1}, 400, "temperature"),
        ("/tokenize", {"messages": TURNS, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "x", "model": "nope"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "model": 5}, 400, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "../../etc/passwd"}, 404, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_wrong_tools_requests_are_refused_by_name(
    stand: Stand, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    found, body, _ = await post(stand, path, **fields)

    assert (found, body["error"]["param"]) == (status, param)


async def test_a_model_has_further_names(stand: Stand) -> None:
    names = [MODEL_NAME, *ALIASES]

    async with stand.gateway.http.get("/v1/models") as response:
        listed = (await response.json())["data"]
    found = []
    for path in (*names, "meta-llama%2FLlama-3-70b-instruct"):
        async with stand.gateway.http.get(
            URL(f"{stand.gateway.base_url}/v1/models/{path}", encoded=True)
        ) as response:
            found.append(await response.json())

    assert [model["id"] for model in listed] == names
    assert {model["root"] for model in listed} == {MODEL_NAME}
    assert found == [*listed, listed[1]]


@pytest.mark.parametrize("alias", ALIASES)
async def test_an_alias_is_the_model_everywhere(stand: Stand, alias: str) -> None:
    _, body, request_id = await chat(stand, model=alias)
    record = await stand.telemetry.wait_for(request_id)
    _, text, _ = await complete(stand, "x", model=alias)
    status, _, _ = await post(stand, "/tokenize", prompt="x", model=alias)
    _, refused, _ = await chat(stand, model=alias + "x")

    # Clients compare the answer's model with what they asked for; accounts add up by the model's own name.
    assert body["model"] == text["model"] == alias
    assert record.model_name == stand.router.enqueues[-1].model_name == MODEL_NAME
    assert (status, refused["error"]["code"]) == (200, "model_not_found")


# --- OpenAI's own client, which checks every answer against its types.


@pytest_asyncio.fixture(loop_scope="module")
async def client(stand: Stand) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stand.gateway.base_url}/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_the_openai_client_takes_several_choices_with_log_probabilities(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Count."}]

    whole = await client.chat.completions.create(
        model=MODEL_NAME, messages=messages, n=3, logprobs=True, top_logprobs=2
    )
    pieces: dict[int, str] = {}
    names: dict[int, list[str]] = {}
    async with client.chat.completions.stream(
        model=MODEL_NAME, messages=messages, n=3, logprobs=True, top_logprobs=2
    ) as stream:
        async for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    pieces[choice.index] = pieces.get(choice.index, "") + (choice.delta.content or "")
                    content = choice.logprobs.content if choice.logprobs else None
                    names.setdefault(choice.index, []).extend(entry.token for entry in content or ())

    texts = [text for text, _ in CHOICES]
    assert [choice.message.content for choice in whole.choices] == texts
    assert [pieces[index] for index in range(3)] == texts
    for answer in whole.choices:
        assert answer.logprobs is not None
        assert answer.logprobs.content is not None
        assert [entry.token for entry in answer.logprobs.content] == names[answer.index]


async def test_the_openai_client_completes_plain_prompts(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL_NAME, prompt=["a", "b"], n=2, logprobs=1)
    echoed = await client.completions.create(model=MODEL_NAME, prompt=["a", "b"], n=2, echo=True)
    pieces: dict[int, str] = {}
    offsets: dict[int, list[int]] = {}
    # The client's type of a chunk has no null for the reason, which OpenAI sends until the last.
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as lenient:
        async for chunk in await lenient.completions.create(
            model=MODEL_NAME, prompt=["a", "b"], n=2, logprobs=1, stream=True
        ):
            for choice in chunk.choices:
                pieces[choice.index] = pieces.get(choice.index, "") + choice.text
                if choice.logprobs is not None:
                    offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset or ())

    texts = [CHOICES[index % 2][0] for index in range(4)]
    assert [choice.text for choice in whole.choices] == texts
    assert [pieces[index] for index in range(4)] == texts
    assert [choice.text for choice in echoed.choices] == [
        prompt + text for prompt, text in zip("aabb", texts, strict=True)
    ]
    assert [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs] == [
        offsets[index] for index in range(4)
    ]


async def test_the_openai_client_lists_models_and_their_further_names(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL_NAME, *ALIASES]
    assert (await client.models.retrieve(ALIASES[0])).id == ALIASES[0]
