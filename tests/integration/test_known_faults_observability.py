"""Faults of other servers in their figures, as far as the gateway's are concerned, each by its id."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from libs.errors import InternalError
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Stand
from tests.integration.http_answers import CHAT, QUESTION, chat, text

pytestmark = pytest.mark.asyncio(loop_scope="session")

Samples = dict[str, float]


async def scrape(stand: Stand) -> Samples:
    """Every sample of /metrics by its name and labels."""
    async with stand.gateway.http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def rise(before: Samples, after: Samples, name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def buckets(before: Samples, after: Samples, name: str) -> dict[float, float]:
    prefix = f'{name}_bucket{{le="'
    return {
        math.inf if le == "+Inf" else float(le): rise(before, after, sample)
        for sample in after
        if sample.startswith(prefix) and (le := sample.removeprefix(prefix).removesuffix('"}'))
    }


async def test_every_request_with_a_token_has_one_ttft_that_holds_all_its_waiting(stand: Stand) -> None:
    """OBS-01."""
    slow = Script(token_ids=stand.encode("one two three"), first_delay_seconds=0.2, step_delay_seconds=0.02)
    stand.engine.default_script = slow
    before = await scrape(stand)

    await asyncio.gather(
        chat(stand, stream=True),
        chat(stand),
        text(stand),
        text(stand, stream=True),
        chat(stand, max_tokens=1),
        chat(stand, max_tokens=1, stream=True),
        chat(stand, n=3),
        chat(stand, logprobs=True, stream=True),
    )
    stand.engine.default_script = Script(
        token_ids=stand.encode("one"), first_delay_seconds=0.2, num_cached_tokens=16
    )
    await chat(stand)
    # A stream has its first chunk, a sign of life, long before its first token.
    stand.engine.default_script = Script(token_ids=stand.encode("one two"), first_delay_seconds=0.5)
    await chat(stand, stream=True)
    after = await scrape(stand)

    name = "octavo_gateway_ttft_seconds"
    assert rise(before, after, f"{name}_count") == 10
    assert rise(before, after, f"{name}_sum") >= 9 * 0.2 + 0.5
    found = buckets(before, after, name)
    assert all(count == 0 for le, count in found.items() if le < 0.2)
    assert found[math.inf] == 10
    assert max(le for le in found if le < math.inf) > 60
    # One more time for each further delivery, and none for a request of one token.
    assert rise(before, after, "octavo_gateway_e2e_seconds_count") == 10


async def test_a_request_without_a_token_has_no_ttft(stand: Stand) -> None:
    """OBS-01."""
    before = await scrape(stand)
    await chat(stand, n=0)
    stand.engine.default_script = Script(error=InternalError("Broken."))
    await chat(stand)
    after = await scrape(stand)

    assert rise(before, after, "octavo_gateway_ttft_seconds_count") == 0
    assert rise(before, after, "octavo_gateway_e2e_seconds_count") == 2


async def test_what_was_started_is_the_sum_of_how_it_ended(stand: Stand) -> None:
    """OBS-02."""
    before = await scrape(stand)
    # What ended before has its record.
    num_started = before["octavo_gateway_requests_started_total"]
    await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) >= num_started)
    known = len(stand.telemetry.records)
    for _ in range(5):
        await chat(stand)
    await chat(stand, max_tokens=1)
    stand.engine.default_script = Script(token_ids=stand.encode("one two"), hangs=True)
    for is_streaming in (True, True, False):
        await leave(stand, is_streaming=is_streaming)
    stand.engine.default_script = Script(token_ids=stand.encode("one"), error=InternalError("Broken."))
    await chat(stand)
    await chat(stand, n=0)
    await chat(stand, model="nobody")
    await stand.telemetry.wait_until_count(lambda: len(stand.telemetry.records) >= known + 12)
    after = await scrape(stand)

    ended = {
        status: rise(before, after, f'octavo_gateway_requests_ended_total{{status="{status}"}}')
        for status in ("stop", "length", "aborted", "error", "rejected")
    }
    assert ended == {"stop": 5, "length": 1, "aborted": 3, "error": 1, "rejected": 2}
    assert rise(before, after, "octavo_gateway_requests_started_total") == sum(ended.values())
    assert after["octavo_gateway_requests_in_flight"] == before["octavo_gateway_requests_in_flight"] == 0
    records = stand.telemetry.records[known:]
    assert Counter(record.request_id for record in records).most_common(1)[0][1] == 1
    for name, attribute in (("prompt", "prompt_tokens"), ("completion", "completion_tokens")):
        counted = sum(
            rise(before, after, sample)
            for sample in after
            if sample.startswith(f"octavo_gateway_{name}_tokens_total{{")
        )
        assert counted == sum(getattr(record, attribute) for record in records)
    discarded = rise(before, after, "octavo_gateway_discarded_tokens_total")
    assert discarded == sum(record.discarded_tokens for record in records)


async def leave(stand: Stand, *, is_streaming: bool) -> None:
    num_submits = len(stand.engine.submits)
    body: dict[str, Any] = {"model": MODEL_NAME, "messages": QUESTION, "stream": is_streaming}
    asking = asyncio.create_task(stand.gateway.http.post(CHAT, json=body).__aenter__())
    await stand.engine.wait_until(lambda: len(stand.engine.submits) > num_submits)
    request_id = stand.engine.submits[-1].request_id
    if is_streaming:
        response = await asking
        await response.content.readany()
        response.close()
    else:
        await asyncio.sleep(0.05)
        asking.cancel()
    await stand.engine.wait_until(lambda: request_id in stand.engine.aborted_ids)
    await stand.telemetry.wait_for(request_id)
