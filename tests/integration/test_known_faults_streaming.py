"""Faults of other servers in streams, and in what becomes of them when engines fail, each by its id."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from libs.errors import InternalError, InvalidLogits, OctavoError, Overloaded
from libs.protogen.telemetry.v1 import telemetry_pb2
from tests.fakes.fake_generation_engine import FakeGenerationEngine, Script
from tests.integration.gateway_process import MODEL_NAME, Stand, open_stand
from tests.integration.http_answers import (
    CHAT,
    QUESTION,
    TEXT,
    Answer,
    chat,
    chat_parts,
    post,
    refused,
    still_serves,
    streamed_text,
)
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION},
    TEXT: {"prompt": "Say hi."},
    "/v1/responses": {"input": "Say hi."},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 100},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streaming", [True, False])
async def test_who_leaves_while_waiting_is_never_submitted(stand: Stand, path: str, is_streaming: bool) -> None:
    """STR-02."""
    stand.router.holds = True
    num_submits, num_enqueues = len(stand.engine.submits), len(stand.router.enqueues)

    waiting = asyncio.create_task(post(stand, path, BODIES[path] | {"stream": is_streaming}))
    await stand.router.wait_until(lambda: len(stand.router.enqueues) > num_enqueues)
    request_id = stand.router.enqueues[-1].request_id
    waiting.cancel()
    await stand.router.wait_until(lambda: request_id in stand.router.cancelled_ids)
    stand.router.holds = False
    record = await stand.telemetry.wait_for(request_id)

    assert len(stand.engine.submits) == num_submits
    assert record.status == telemetry_pb2.REQUEST_STATUS_ABORTED
    assert (record.completion_tokens, record.discarded_tokens, record.http_status) == (0, 0, 0)
    assert await stand.gateway.metric("octavo_gateway_requests_in_flight") == 0
    await still_serves(stand)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_who_leaves_ends_the_request_on_the_engine(
    stand: Stand, path: str, is_streaming: bool, num_tokens: int
) -> None:
    """STR-02: in every dialect and mode, before and after the first token."""
    stand.engine.default_script = Script(token_ids=stand.encode("one two")[:num_tokens], hangs=True)
    num_submits = len(stand.engine.submits)

    leaving = asyncio.create_task(post(stand, path, BODIES[path] | {"stream": is_streaming}))
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits)
    request_id = stand.engine.submits[-1].request_id
    await stand.until_all_is_taken()
    leaving.cancel()
    await stand.engine.wait_until(lambda: request_id in stand.engine.aborted_ids)
    record = await stand.telemetry.wait_for(request_id)

    assert record.status == telemetry_pb2.REQUEST_STATUS_ABORTED
    # What came is billed once, whether or not the client could still read it.
    assert record.completion_tokens + record.discarded_tokens == num_tokens
    assert not stand.engine.running_ids


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_who_waits_too_long_is_told_when_to_come_back(stand: Stand, is_streaming: bool) -> None:
    """STR-02."""
    stand.router.refusal = Overloaded("The request waited its longest time.", retry_after_seconds=2.5)

    answer = await chat(stand, stream=is_streaming)

    assert refused(answer, status=503)["code"] == "overloaded"
    assert answer.headers["Retry-After"] == "3"


async def test_silence_is_filled_with_comments_and_nothing_else(stand: Stand) -> None:
    """STR-03."""
    for path in (CHAT, TEXT):
        first, last = asyncio.Event(), asyncio.Event()
        stand.engine.default_script = Script(
            token_ids=stand.encode("one two"), first_step_after=first, last_step_after=last
        )
        body = {"model": MODEL_NAME} | BODIES[path] | USAGE
        async with stand.gateway.http.post(path, json=body) as response:
            begun = await response.content.readuntil(b": ping\n\n")
            first.set()
            while b"data: " not in begun or not begun.endswith(b": ping\n\n"):
                begun += await response.content.readuntil(b"\n\n")
            last.set()
            raw = (begun + await response.read()).decode()
        blocks = raw.removesuffix("\n\n").split("\n\n")
        pings = [block for block in blocks if block.startswith(":")]
        assert set(pings) == {": ping"}
        # No event without data, no id, no retry, no name.
        assert all(block.startswith("data: ") for block in blocks if block not in pings)
        assert blocks[0] == ": ping"
        assert blocks[-1] == "data: [DONE]"


async def test_openais_clients_get_everything_through_the_silence(stand: Stand) -> None:
    """STR-03: they give up after less silence than there is before the first token."""
    stand.engine.default_script = Script(
        token_ids=stand.encode("one two"), first_delay_seconds=3.0, step_delay_seconds=0.05
    )
    request: Any = {"model": MODEL_NAME, "messages": QUESTION, "stream": True}
    request["stream_options"] = {"include_usage": True}
    impatient = openai.Timeout(PATIENCE_SECONDS, read=2.0)

    def read_sync() -> list[Any]:
        url = f"{stand.gateway.base_url}/v1"
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=impatient) as client:
            return list(client.chat.completions.create(**request))

    async with openai.AsyncOpenAI(
        base_url=f"{stand.gateway.base_url}/v1", api_key="x", max_retries=0, timeout=impatient
    ) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**request)]

    for found in (chunks, await asyncio.to_thread(read_sync)):
        text = "".join(choice.delta.content or "" for chunk in found for choice in chunk.choices)
        assert text == "one two"
        assert found[-1].usage.completion_tokens == 2


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("tokens_per_step", [1, 50])
async def test_events_are_one_line_also_for_clients_that_cut_text_at_unicodes_ends_of_lines(
    stand: Stand, path: str, tokens_per_step: int
) -> None:
    """florimondmanca/httpx-sse#34: the same fault is in each client that reads lines with ``str.splitlines``."""
    said = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1ee\r\nf\rg"
    stand.engine.default_script = Script(token_ids=stand.encode(said), tokens_per_step=tokens_per_step)

    limit = {"max_tokens": 50} if path == TEXT else {}
    raw = (await post(stand, path, BODIES[path] | {"stream": True} | limit)).raw.decode()

    lines = [line for line in raw.splitlines() if line]
    assert all(line.startswith(("data: ", "event: ", ": ping")) for line in lines)
    assert any("\\u2028" in line for line in lines)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if path in (CHAT, TEXT):
        assert streamed_text(events) == said
    else:
        deltas = [event["delta"] for event in events if "delta" in event]
        assert "".join(one if isinstance(one, str) else one.get("text", "") for one in deltas) == said


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_is_wrong_is_refused_before_its_stream(stand: Stand, path: str) -> None:
    """STR-06."""
    wrong = {"temperature": 9} if path.startswith(("/v1/re", "/v1/m")) else {"n": 0}
    answer = await post(stand, path, BODIES[path] | {"stream": True} | wrong)

    assert answer.status == 400
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.json["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("error", "code"), [(InvalidLogits("NaN."), "invalid_logits"), (InternalError("Bug."), "internal_error")]
)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, USAGE])
async def test_a_failure_mid_stream_is_one_event_and_the_end_of_the_connection(
    stand: Stand, path: str, error: OctavoError, code: str, fields: dict[str, Any]
) -> None:
    """STR-06."""
    stand.engine.scripts.append(Script(token_ids=stand.encode("a b c"), error=error))

    async with asyncio.timeout(PATIENCE_SECONDS):
        # Returns only when the server has closed the connection.
        raw = await raw_stream(stand, path, BODIES[path] | {"stream": True} | fields)
    answer = Answer(200, {"Content-Type": "text/event-stream"}, raw)
    *before, last = answer.events

    assert last.keys() == {"error"}
    assert {"message", "type", "code", "param"} == last["error"].keys()
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", code)
    assert not any("error" in event for event in before)
    assert all(part["finish_reason"] is None for part in chat_parts(before))
    assert b"[DONE]" not in raw
    await still_serves(stand)


async def raw_stream(stand: Stand, path: str, fields: dict[str, Any]) -> bytes:
    """A stream's body, from a connection that only the server can end."""
    body = json.dumps({"model": MODEL_NAME} | fields).encode()
    host, port = stand.gateway.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    head_lines, _, rest = answer.partition(b"\r\n\r\n")
    assert head_lines.startswith(b"HTTP/1.1 200")
    return b"".join(chunks_of(rest))


def chunks_of(rest: bytes) -> Iterator[bytes]:
    """The chunks of a chunked body, which must be whole."""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            assert rest == b"\r\n"
            return
        yield rest[: int(size, 16)]
        rest = rest[int(size, 16) :].removeprefix(b"\r\n")


async def test_five_hundred_streams_at_once_each_end_with_one_done(stand: Stand) -> None:
    """STR-06."""
    stand.engine.default_script = Script(token_ids=stand.encode("one two three"), tokens_per_step=2)

    answers = await asyncio.gather(*(chat(stand, **USAGE) for _ in range(500)))

    assert {answer.status for answer in answers} == {200}
    for answer in answers:
        events = answer.events
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        assert streamed_text(events) == "one two three"
        assert events[-2]["usage"]["completion_tokens"] == 3
    assert len({answer.request_id for answer in answers}) == 500


# --- RTR-02 and RTR-08: engines that do not do what they promised.


def second_engine(stand: Stand, engine_id: str = "fake-1") -> FakeGenerationEngine:
    return FakeGenerationEngine(tokenizer_digest=stand.engine.tokenizer_digest, engine_id=engine_id)


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("fault", ["never answers", "closes the stream", "is killed with a full inbox"])
async def test_work_that_was_not_begun_is_done_elsewhere_once(stand: Stand, fault: str, is_streaming: bool) -> None:
    """RTR-02."""
    bad, num_requests, all_have_come = second_engine(stand), 8, asyncio.Event()
    bad.default_script = {
        "never answers": Script(is_deaf=True),
        "closes the stream": Script(breaks_stream=True, last_step_after=all_have_come),
        "is killed with a full inbox": Script(hangs=True),
    }[fault]
    await bad.start()
    stand.router.engines[:] = [bad]
    num_good = len(stand.engine.submits)
    asked = [asyncio.create_task(chat(stand, stream=is_streaming)) for _ in range(num_requests)]
    await bad.wait_until(lambda: len(bad.submits) >= num_requests)
    stand.router.engines[:] = [bad, stand.engine]
    all_have_come.set()
    if fault != "closes the stream":
        await bad.stop()
    async with asyncio.timeout(PATIENCE_SECONDS):
        answers = await asyncio.gather(*asked)
    await bad.stop()

    assert [answer.status for answer in answers] == [200] * num_requests
    for answer in answers:
        record = await stand.telemetry.wait_for(answer.request_id)
        assert (record.status, record.num_retries) == (telemetry_pb2.REQUEST_STATUS_STOP, 1)
    resent = [submit.request_id for submit in list(stand.engine.submits)[num_good:]]
    assert sorted(resent) == sorted(answer.request_id for answer in answers)
    assert await stand.gateway.metric("octavo_gateway_requests_in_flight") == 0


@pytest.mark.parametrize("is_streaming", [True, False])
async def test_engines_that_all_fail_are_a_5xx_and_no_request_outlives_its_deadline(
    stand: Stand, is_streaming: bool
) -> None:
    """RTR-02."""
    deaf = second_engine(stand)
    deaf.default_script = Script(breaks_stream=True)
    await deaf.start()
    stand.router.engines[:] = [deaf]

    async with asyncio.timeout(PATIENCE_SECONDS):
        answer = await chat(stand, stream=is_streaming)
    await deaf.stop()

    if answer.status == 200:
        # This gateway's signs of life come so soon that a stream may have begun while an engine was looked for.
        assert is_streaming
        assert answer.raw.replace(b": ping\n\n", b"").startswith(b'data: {"error":')
        assert b'"code":"engine_lost"' in answer.raw
    else:
        assert refused(answer, status=502)["code"] == "engine_lost"
    assert await stand.gateway.metric("octavo_gateway_requests_in_flight") == 0


@pytest.mark.slow
async def test_an_engine_that_takes_nothing_is_given_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """RTR-02: alive, connected, and silent for ever."""
    flags = ("--engine-accept-timeout-seconds", "0.2", "--request-timeout-seconds", "3")
    async with open_stand(tmp_path_factory.mktemp("deaf"), *flags) as stand:
        deaf = second_engine(stand)
        deaf.default_script = Script(is_deaf=True)
        await deaf.start()
        stand.engine.default_script = Script(token_ids=stand.encode("Hello"))
        stand.router.engines[:] = [deaf]
        alone = await chat(stand)
        stand.router.engines[:] = [deaf, stand.engine]
        together = await asyncio.gather(*(chat(stand) for _ in range(4)))
        stand.engine.default_script = Script(hangs=True)
        stand.router.engines[:] = [stand.engine]
        late = await chat(stand)
        await deaf.stop()

    assert refused(alone, status=502)["code"] == "engine_lost"
    assert [answer.status for answer in together] == [200] * 4
    assert refused(late, status=504)["code"] == "deadline_exceeded"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
BROKEN_STREAMS: list[Any] = [
    pytest.param({}, id="plain text"),
    pytest.param(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, id="schema"
    ),
    pytest.param({"n": 2}, id="two choices"),
    pytest.param({"seed": 7, "temperature": 1.0}, id="seeded"),
    pytest.param({"logprobs": True, "top_logprobs": 1}, id="logprobs"),
    pytest.param({"stop": ["four five NEVER"]}, id="half a stop string"),
]


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("fields", BROKEN_STREAMS)
async def test_a_broken_answer_goes_on_elsewhere_as_if_nothing_had_been(
    stand: Stand, fields: dict[str, Any], is_streaming: bool
) -> None:
    """RTR-08: nothing is lost, doubled or made up, and the client sees nothing of it."""
    full = "one two three four five six seven"
    token_ids, other = stand.encode(full), second_engine(stand, f"fake-{uuid.uuid4()}")
    # What others have made it lose is forgiven when it has served again.
    await still_serves(stand)
    # The second choice, where there is one, is behind the first when the engine breaks.
    behind = Script(token_ids=token_ids[:3], hangs=True)
    stand.engine.default_script = Script(
        token_ids=token_ids[:5], breaks_stream=True, step_delay_seconds=0.02, other_choices=(behind,)
    )
    other.default_script = Script(token_ids=token_ids, goes_on=True)
    await other.start()
    # The router takes turns; the first place is to be on the engine that breaks.
    is_second = (len(stand.router.enqueues) + 1) % 2
    stand.router.engines[:] = [other, stand.engine] if is_second else [stand.engine, other]

    answer = await chat(stand, **(USAGE | fields if is_streaming else fields))
    await other.stop()
    record = await stand.telemetry.wait_for(answer.request_id)

    num_choices = fields.get("n", 1)
    first, resumed = stand.engine.submits[-1], other.submits[-1]
    shown = [list(choice.output_token_ids) for choice in resumed.choices]
    assert shown == [token_ids[:5], token_ids[:3]][:num_choices]
    assert [choice.choice_index for choice in resumed.choices] == list(range(num_choices))
    # All else is as it was, the seed above all.
    assert resumed.sampling_params == first.sampling_params
    assert resumed.request_id == first.request_id
    for index in range(num_choices):
        check_choice(answer, index, full, with_logprobs="logprobs" in fields, is_streaming=is_streaming)
    usage = answer.events[-2]["usage"] if is_streaming else answer.json["usage"]
    assert usage["completion_tokens"] == num_choices * len(token_ids) == record.completion_tokens
    assert usage["prompt_tokens"] == record.prompt_tokens == len(first.prompt_token_ids)
    assert record.status == telemetry_pb2.REQUEST_STATUS_STOP
    assert (record.num_retries, record.discarded_tokens, record.engine_id) == (1, 0, other.engine_id)


def check_choice(answer: Answer, index: int, text: str, *, with_logprobs: bool, is_streaming: bool) -> None:
    """A choice has this text, one beginning and one end, and each of its tokens is measured once."""
    if is_streaming:
        assert answer.events[-1] == "[DONE]"
        parts = [part for part in chat_parts(answer.events) if part["index"] == index]
        assert sum("role" in part["delta"] for part in parts) == 1
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
        assert "".join(part["delta"].get("content") or "" for part in parts) == text
        assert len({event["id"] for event in answer.events[:-1]}) == 1
    else:
        parts = [answer.json["choices"][index]]
        assert parts[0]["message"]["content"] == text
    if with_logprobs:
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert "".join(entry["token"] for entry in entries) == text
