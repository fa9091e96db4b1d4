"""The latency receipt, as clients of every dialect get it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from libs.errors import WorkerLost
from services.gateway.latency_receipt import Segment
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand, events_of, open_stand
from tests.integration.octavo import RunningOctavo
from tests.patience import PATIENCE_SECONDS

StartOctavo = Callable[..., AbstractContextManager[RunningOctavo]]

TURNS = [{"role": "user", "content": "Say hi"}]
BY_HEADER = {"X-Octavo-Timings": "1"}
DIALECTS = [
    pytest.param("/v1/chat/completions", {"messages": TURNS}, id="chat"),
    pytest.param("/v1/completions", {"prompt": "Say hi"}, id="text"),
    pytest.param("/v1/messages", {"messages": TURNS, "max_tokens": 9}, id="messages"),
    pytest.param("/v1/responses", {"input": "Say hi"}, id="responses"),
]
# Segments that every request has, however it is asked.
ALWAYS = {"receive", "auth", "parse", "record", "template", "tokenize", "hash", "router_queue", "prefill"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    async with open_stand(tmp_path_factory.mktemp("receipt"), "--receipt-stall-seconds", "0.2") as stand:
        yield stand


@pytest.fixture
def stand(shared_stand: Stand) -> Stand:
    shared_stand.engine.scripts.clear()
    shared_stand.engine.default_script = Script(
        token_ids=shared_stand.encode("One two three"), first_delay_seconds=0.03, step_delay_seconds=0.01
    )
    return shared_stand


async def ask(
    stand: Stand, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> tuple[dict[str, Any] | None, dict[str, float]]:
    """Return the receipt at the end of an answer and the Server-Timing at its beginning."""
    body = {"model": MODEL_NAME} | fields
    async with stand.gateway.http.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        raw = await response.read()
        told = _server_timing(response.headers.get("Server-Timing", ""))
    if not fields.get("stream"):
        return json.loads(raw).get("timings"), told
    last = [line for line in raw.decode().splitlines() if line.startswith("data: {")][-1]
    return json.loads(last.removeprefix("data: ")).get("timings"), told


def _server_timing(value: str) -> dict[str, float]:
    entries = [re.fullmatch(r"([a-z_]+);dur=(\d+\.\d{3})", entry) for entry in value.split(", ")] if value else []
    assert all(entries), value
    return {entry[1]: float(entry[2]) for entry in entries if entry}


def check_sum(receipt: dict[str, Any]) -> dict[str, int]:
    segments: dict[str, int] = receipt["segments_us"]
    assert list(segments) == [segment.value for segment in Segment]
    assert all(micros >= 0 for micros in segments.values())
    assert sum(segments.values()) + receipt["unattributed_us"] == receipt["wall_us"]
    return segments


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "fields"), DIALECTS)
async def test_every_dialect_ends_with_a_receipt_that_adds_up(
    stand: Stand, path: str, fields: dict[str, Any], stream: bool
) -> None:
    receipt, told = await ask(stand, path, BY_HEADER, stream=stream, **fields)

    assert receipt is not None
    segments = check_sum(receipt)
    expected = ALWAYS - ({"template"} if path == "/v1/completions" else set())
    assert {name for name in expected if not segments[name]} == set()
    # The first token takes 30 ms; what the gateway does meanwhile is no part of the wait for the others.
    assert segments["prefill"] >= 30_000
    assert segments["decode"] > 0
    assert (segments["first_token"] > 0) == (segments["write_blocked"] > 0) == stream
    assert receipt["absent"]["guardrail"]
    assert ("first_token" in receipt["absent"]) == (not stream)
    # What is known before the first byte is told there, with the same numbers.
    assert expected <= set(told)
    assert ("decode" in told) == (not stream)
    assert {name: told[name] * 1_000 for name in expected} == pytest.approx(
        {name: segments[name] for name in expected}
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_nobody_who_did_not_ask_gets_one(stand: Stand) -> None:
    for path, fields in (("/v1/chat/completions", {"messages": TURNS}), ("/v1/completions", {"prompt": "a"})):
        for stream in (True, False):
            assert await ask(stand, path, stream=stream, **fields) == (None, {})
    assert not stand.engine.submits[-1].HasField("stall_bound")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_body_can_ask_too_and_a_wrong_value_is_named(stand: Stand) -> None:
    receipt, _ = await ask(stand, "/v1/chat/completions", messages=TURNS, timings=True)
    async with stand.gateway.http.post(
        "/v1/chat/completions", json={"model": MODEL_NAME, "messages": TURNS, "timings": "yes"}
    ) as response:
        error = (await response.json())["error"]

    assert receipt is not None
    assert (response.status, error["param"]) == (400, "timings")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_refusal_tells_what_was_known_of_its_time(stand: Stand) -> None:
    async with stand.gateway.http.post("/v1/chat/completions", json={}, headers=BY_HEADER) as response:
        told = _server_timing(response.headers["Server-Timing"])

    assert response.status == 400
    assert {"receive", "auth", "parse"} <= set(told)


@pytest.mark.asyncio(loop_scope="module")
async def test_several_choices_and_prompts_have_one_waterfall_and_a_line_each(stand: Stand) -> None:
    slow = Script(token_ids=[1, 2], first_delay_seconds=0.6, num_cached_tokens=1)
    fast = Script(token_ids=[1, 2], first_delay_seconds=0.05)
    stand.engine.scripts.extend([slow, fast])

    receipt, _ = await ask(stand, "/v1/completions", prompt=["a b c", "d e"], n=2, timings=True)

    assert receipt is not None
    segments = check_sum(receipt)
    assert [choice["index"] for choice in receipt["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_tokens"] for choice in receipt["choices"]] == [3, 3, 2, 2]
    assert receipt["choices"][0]["cached_tokens"] == 1
    assert receipt["choices"][0]["computed_because"] == {"not_seen": 2}
    # The prompt whose token came first is what the client waited for; the rest is waiting for further tokens.
    assert segments["prefill"] == min(choice["prefill_us"] for choice in receipt["choices"])
    assert segments["decode"] + segments["stalls"] >= 100_000


@pytest.mark.asyncio(loop_scope="module")
async def test_a_failed_try_is_a_segment_of_its_own(stand: Stand) -> None:
    lost = WorkerLost("The worker is gone.", retry_after_seconds=1.0)
    stand.engine.scripts.append(Script(error=lost, first_delay_seconds=0.15))

    receipt, _ = await ask(stand, "/v1/chat/completions", messages=TURNS, timings=True)

    assert receipt is not None
    segments = check_sum(receipt)
    assert receipt["retries"] == 1
    assert segments["retries"] >= 150_000
    assert segments["prefill"] < 150_000


@pytest.mark.asyncio(loop_scope="module")
async def test_waiting_for_the_counts_after_a_stop_string_is_a_segment(stand: Stand) -> None:
    receipt, _ = await ask(stand, "/v1/chat/completions", messages=TURNS, timings=True, stop=["two"], stream=True)

    assert receipt is not None
    assert check_sum(receipt)["settle"] > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_gap_that_the_engine_does_not_know_was_made_on_the_way(stand: Stand) -> None:
    stand.engine.default_script = Script(token_ids=[1, 2], step_delay_seconds=0.6)

    receipt, _ = await ask(stand, "/v1/chat/completions", messages=TURNS, timings=True)

    assert receipt is not None
    [stall] = receipt["stalls"]["first"]
    assert (stall["choice"], stall["reason"], stall["step_us"]) == (0, "wire", None)
    assert stall["step_id"] > 0
    assert stall["gap_us"] > 200_000
    assert receipt["stalls"]["bound_us"] == 200_000
    assert check_sum(receipt)["stalls"] > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_the_receipt_of_a_client_that_left_is_in_the_log(stand: Stand) -> None:
    stand.engine.default_script = Script(token_ids=stand.encode("One"), hangs=True, first_delay_seconds=0.02)
    body = {"model": MODEL_NAME, "messages": TURNS, "stream": True, "timings": True}
    async with stand.gateway.http.post("/v1/chat/completions", json=body) as response:
        request_id = response.headers["X-Octavo-Request-Id"]
        await response.content.readline()

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (found := [event for event in stand.gateway.log if _is_receipt_of(request_id, event)]):
            await asyncio.sleep(0.02)
    [event] = found
    assert check_sum(event["timings"])["prefill"] >= 20_000


def _is_receipt_of(request_id: str, event: dict[str, Any]) -> bool:
    return "timings" in event and event["request_id"] == request_id


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reader_that_does_not_read_is_the_reason_of_its_stall(stand: Stand) -> None:
    # The first write is the prompt a hundred times, which no buffer holds.
    body = {"model": MODEL_NAME, "prompt": "word " * 7000, "echo": True, "n": 100, "stream": True, "timings": True}
    raw = await _read_late(stand.gateway.base_url, json.dumps(body).encode(), delay_seconds=2.0)

    receipt = events_of(raw)[-2]["timings"]
    assert check_sum(receipt)["write_blocked"] > 200_000
    assert "slow_reader" in {stall["reason"] for stall in receipt["stalls"]["first"]}


async def _read_late(base_url: str, body: bytes, *, delay_seconds: float) -> bytes:
    """Send a request and read its answer after a while; almost nothing of it fits into the buffers on the way."""
    url = URL(base_url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (url.host, url.port))
        reader, writer = await asyncio.open_connection(sock=connection)
        head = (
            "POST /v1/completions HTTP/1.0",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        await asyncio.sleep(delay_seconds)
        answer = await reader.read()
        writer.close()
    return answer.partition(b"\r\n\r\n")[2]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_second_request_on_a_connection_does_not_count_the_pause_before_it(stand: Stand) -> None:
    """Nor does one whose body comes late lose the time that it took to come."""
    async with aiohttp.ClientSession(stand.gateway.base_url, connector=aiohttp.TCPConnector(limit=1)) as http:
        receipts = []
        for pause_seconds, delay_seconds in ((0.0, 0.0), (3.0, 0.6)):
            await asyncio.sleep(pause_seconds)
            body = json.dumps({"model": MODEL_NAME, "messages": TURNS, "timings": True}).encode()
            headers = {"Content-Type": "application/json"}
            data = _slowly(body, delay_seconds)
            async with http.post("/v1/chat/completions", data=data, headers=headers) as response:
                receipts.append((await response.json())["timings"])

    # The pause would make it 3.6 s.
    assert 250_000 <= receipts[1]["segments_us"]["receive"] < 3_000_000


async def _slowly(body: bytes, delay_seconds: float) -> AsyncIterator[bytes]:
    yield body[:5]
    await asyncio.sleep(delay_seconds)
    yield body[5:]


async def test_a_long_prompt_of_another_is_named_as_the_reason_of_a_stall(running_octavo: StartOctavo) -> None:
    # A token takes 5 ms of a step; 500 prompt tokens of another make a step of 0.5 s.
    flags = ("worker.runner=stub", "worker.stub_step_seconds=0.005", "worker.stub_seconds_per_token=0.001")
    settings = [part for flag in flags for part in ("--set", flag)]
    with running_octavo(*settings, "--set", "engine.max_prefill_share=1.0") as octavo:
        async with aiohttp.ClientSession(octavo.base_url) as http:
            asking = {"messages": TURNS, "model": MODEL_NAME, "timings": True, "max_tokens": 500}
            asking |= {"ignore_eos": True, "stream": True}
            async with http.post("/v1/chat/completions", json=asking) as response:
                before = await response.content.readuntil(b"\n\n")
                other = [{"role": "user", "content": "word " * 480}]
                await _post(http, {"messages": other, "model": MODEL_NAME, "max_tokens": 1})
                raw = before + await response.read()

    receipt = events_of(raw)[-2]["timings"]
    segments = check_sum(receipt)
    [stall] = [stall for stall in receipt["stalls"]["first"] if stall["reason"] == "prefill"]
    assert stall["prefill_tokens"] > 400
    assert stall["gap_us"] > 400_000
    assert stall["step_us"] <= stall["gap_us"] * 1.2
    assert segments["stalls"] > 400_000
    assert receipt["stalls"]["bound_us"] == 100_000


async def _post(http: aiohttp.ClientSession, body: dict[str, Any]) -> bytes:
    async with http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.slow
async def test_of_the_real_models_time_next_to_nothing_is_unattributed(running_octavo: StartOctavo) -> None:
    receipts: list[dict[str, Any]] = []
    with running_octavo() as octavo:
        async with aiohttp.ClientSession(octavo.base_url) as http:
            for number in range(20):
                turns = [{"role": "user", "content": f"Count from {number} on, please."}]
                body = {"messages": turns, "model": MODEL_NAME, "timings": True, "max_tokens": 8}
                raw = await _post(http, body | {"stream": bool(number % 2)})
                receipts.append(events_of(raw)[-2]["timings"] if number % 2 else json.loads(raw)["timings"])

    for receipt in receipts:
        check_sum(receipt)
    shares = [abs(receipt["unattributed_us"]) / receipt["wall_us"] for receipt in receipts]
    # A busy machine can take the core away between any two marks, so the middle one is what counts.
    assert statistics.median(shares) < 0.02, sorted(shares)
