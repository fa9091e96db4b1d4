"""Known faults of other servers over the whole system, with the real model or a stub in its place, by their ids."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.integration.conftest import StartOctavo
from tests.integration.gateway_process import MODEL_NAME, events_of
from tests.integration.observations import audit_rows, metric, seconds_until_no_block_is_held
from tests.integration.octavo import RunningOctavo, start_octavo
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Say hi."}]
STUB = ("--set", "worker.runner=stub", "--set", "worker.stub_step_seconds=0.02")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningOctavo]:
    """The whole system with the real model, for all tests that do not break it."""
    with start_octavo(tmp_path_factory.mktemp("real") / "data") as octavo:
        yield octavo


async def post(octavo: RunningOctavo, path: str, fields: dict[str, Any]) -> tuple[int, Any]:
    """Post; returns the status, and the body or the events of a stream."""
    body = json.dumps({"model": MODEL_NAME, **fields})
    headers = {"Content-Type": "application/json", "Connection": "close"}
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(octavo.base_url, timeout=timeout) as session,
        session.post(path, data=body, headers=headers) as response,
    ):
        raw = await response.read()
        is_stream = response.headers["Content-Type"].startswith("text/event-stream")
        return response.status, events_of(raw) if is_stream else json.loads(raw)


async def chat(octavo: RunningOctavo, **fields: Any) -> tuple[int, Any]:
    return await post(octavo, CHAT, {"messages": QUESTION, "max_tokens": 4} | fields)


def content(body: Any) -> str:
    return str(body["choices"][0]["message"]["content"])


async def test_absurd_sampling_values_leave_the_engine_well(real: RunningOctavo) -> None:
    """API-04."""
    nan, infinity = float("nan"), float("inf")
    sweep: dict[str, list[Any]] = {
        "temperature": [nan, infinity, -1, 1e6, "0.5", True, "NaN"],
        "top_p": [-1, 0, 1.5, nan],
        "top_k": [0.01, -2, 10**12],
        "min_p": [-0.1, 2],
        "repetition_penalty": [0, -1],
        "presence_penalty": [1e9],
    }

    statuses = [(await chat(real, **{name: value}))[0] for name, values in sweep.items() for value in values]
    _, greedy = await chat(real, temperature=0)
    _, tiny = await chat(real, temperature=1e-4)
    edges = [
        (await chat(real, **fields))[0]
        for fields in (
            {"temperature": 2, "top_p": 1e-9},
            {"temperature": 0.001, "top_k": 1},
            {"temperature": 2, "min_p": 1},
            {"repetition_penalty": 0.01},
            {"repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": -2},
            {"logit_bias": {"5": -100, "6": 100}},
        )
    ]

    assert set(statuses) == {400}
    assert content(tiny) == content(greedy) != ""
    assert edges == [200] * 6


async def test_log_probabilities_are_finite_ordered_and_the_same_streamed(real: RunningOctavo) -> None:
    """API-06."""
    for fields, count in (({}, 0), ({"top_logprobs": None}, 0), ({"top_logprobs": 2}, 2)):
        asked = {"logprobs": True, "max_tokens": 3, "temperature": 0, "ignore_eos": True} | fields
        _, whole = await chat(real, **asked)
        _, events = await chat(real, stream=True, **asked)
        entries = whole["choices"][0]["logprobs"]["content"]
        parts = [
            choice["logprobs"]["content"]
            for event in events[:-1]
            for choice in event["choices"]
            if choice["logprobs"]
        ]

        assert len(entries) == 3
        assert [entry for part in parts for entry in part] == entries
        for entry in entries:
            tops = [top["logprob"] for top in entry["top_logprobs"]]
            assert math.isfinite(entry["logprob"])
            assert entry["logprob"] <= 0
            assert len(tops) == count
            assert tops == sorted(tops, reverse=True)
            # The greedy token is the likeliest.
            assert not tops or tops[0] == entry["logprob"]


async def test_a_continued_message_is_the_same_from_the_cache(real: RunningOctavo) -> None:
    """API-08."""
    for ending in ("", " ", "\n", "\t", "  \n"):
        given = f"Sure: {ending}"
        fields = {
            "messages": [*QUESTION, {"role": "assistant", "content": given}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "temperature": 0,
            "max_tokens": 8,
        }
        answers = [await chat(real, **fields) for _ in range(2)]
        _, echoed = await chat(real, echo=True, **fields)

        assert [status for status, _ in answers] == [200, 200]
        assert content(answers[0][1]) == content(answers[1][1])
        assert not content(answers[0][1]).startswith(given)
        assert content(echoed) == given + content(answers[0][1])
        assert answers[1][1]["usage"]["prompt_tokens"] == answers[0][1]["usage"]["prompt_tokens"]


async def test_half_a_character_by_force_is_valid_json(real: RunningOctavo) -> None:
    """API-09."""
    _, tokens = await post(real, "/tokenize", {"prompt": "😀", "return_token_strs": True})
    half = tokens["tokens"][0]
    assert len(tokens["tokens"]) > 1, "an emoji of several tokens is needed"

    for max_tokens in (1, 3):
        for stream in (False, True):
            fields = {"logit_bias": {str(half): 100}, "logprobs": True, "stream": stream, "max_tokens": max_tokens}
            status, found = await chat(real, **fields)
            choices = [c for event in found[:-1] for c in event["choices"]] if stream else found["choices"]
            entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert status == 200
            assert len(entries) == max_tokens
            with pytest.raises(UnicodeDecodeError):
                bytes(entries[0]["bytes"]).decode()
    assert (await chat(real))[0] == 200


async def test_the_borders_of_the_context_hold_with_a_real_engine(real: RunningOctavo) -> None:
    """API-11."""

    async def prompt(num_tokens: int, **fields: Any) -> tuple[int, Any]:
        return await post(real, TEXT, {"prompt": [260] * num_tokens, "max_tokens": 1} | fields)

    status, body = await prompt(8191)
    assert (status, body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (200, 8191, 1)
    for stream in (False, True):
        for num_tokens in (8192, 8193, 9000):
            status, body = await prompt(num_tokens, stream=stream)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_cached_tokens_are_told_alike_everywhere(real: RunningOctavo) -> None:
    """MET-07."""
    prompt = [1000 + index for index in range(200)]
    bodies = [(await post(real, TEXT, {"prompt": prompt, "max_tokens": 2}))[1] for _ in range(2)]
    ids = {body["id"].removeprefix("cmpl-") for body in bodies}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not ids <= (mine := {str(row["request_id"]): row for row in audit_rows(real, at_least=0)}).keys():
            await asyncio.sleep(0.2)

    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
    assert cached == [0, 192]
    assert [body["usage"]["prompt_tokens"] for body in bodies] == [200, 200]
    for body, count in zip(bodies, cached, strict=True):
        row = mine[body["id"].removeprefix("cmpl-")]
        assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) == (200, count, 2)


async def test_counts_do_not_grow_by_preemption(running_octavo: StartOctavo) -> None:
    """MET-07: what is computed again after a preemption is no new prompt and no hit."""
    few = ("--set", "engine.num_blocks=24", "--set", "engine.admission=watermark")
    with running_octavo(*STUB, *few) as octavo:
        prompts = [[2000 + 100 * index + offset for offset in range(64)] for index in range(4)]
        answers = await asyncio.gather(
            *(post(octavo, TEXT, {"prompt": prompt, "max_tokens": 120, "ignore_eos": True}) for prompt in prompts)
        )
        rows = audit_rows(octavo, at_least=4)

    assert [status for status, _ in answers] == [200] * 4
    assert sum(row["num_preemptions"] for row in rows) > 0
    for row in rows:
        assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (64, 120, 0)


async def test_cached_tokens_are_none_without_a_cache(running_octavo: StartOctavo) -> None:
    """MET-07."""
    with running_octavo(*STUB, "--set", "engine.enable_prefix_caching=false") as octavo:
        bodies = [(await post(octavo, TEXT, {"prompt": [5] * 200, "max_tokens": 2}))[1] for _ in range(2)]
        rows = audit_rows(octavo, at_least=2)

    assert [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies] == [0, 0]
    assert [row["cached_tokens"] for row in rows] == [0, 0]


async def test_who_leaves_while_waiting_is_never_computed(running_octavo: StartOctavo) -> None:
    """STR-02."""
    # One request may wait at the engine, to follow at once; others wait at the router.
    alone = ("--set", "engine.max_num_seqs=1", "--set", "router.max_wait_seconds=1.5")
    with running_octavo(*STUB, *alone) as octavo:
        long = asyncio.create_task(chat(octavo, max_tokens=250, ignore_eos=True, stream=True))
        while not await asyncio.to_thread(metric, octavo, "octavo_engine_running_requests"):
            await asyncio.sleep(0.02)
        used = await asyncio.to_thread(metric, octavo, "octavo_engine_kv_blocks_used")
        waiting = asyncio.create_task(post(octavo, TEXT, {"prompt": [7] * 3000, "max_tokens": 1}))
        await asyncio.sleep(0.3)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await asyncio.to_thread(metric, octavo, "octavo_engine_waiting_requests"):
                await asyncio.sleep(0.02)
        after = await asyncio.to_thread(metric, octavo, "octavo_engine_kv_blocks_used")
        answers = await asyncio.gather(chat(octavo), chat(octavo))
        long_status, events = await long
        rows = audit_rows(octavo, at_least=4)

    assert (long_status, events[-1]) == (200, "[DONE]")
    refusals = [body["error"]["code"] for status, body in answers if status == 503]
    assert refusals == ["overloaded"]
    assert sorted(status for status, _ in answers) == [200, 503]
    # A prompt of 3,000 tokens would have taken 188 blocks.
    assert after - used < 20
    by_status = {row["status"]: row for row in rows}
    assert by_status["aborted"]["completion_tokens"] == 0
    assert by_status["aborted"]["discarded_tokens"] == 0


async def test_an_idle_engine_reports_that_it_is_idle_and_is_used_again(running_octavo: StartOctavo) -> None:
    """OBS-03."""
    with running_octavo(*STUB, "--engines", "2") as octavo:
        streams = [
            asyncio.create_task(chat(octavo, max_tokens=2000, ignore_eos=True, stream=True)) for _ in range(32)
        ]
        while await asyncio.to_thread(metric, octavo, "octavo_engine_running_requests") < 32:
            await asyncio.sleep(0.05)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await seconds_until_no_block_is_held(octavo)
        idle = [
            await asyncio.to_thread(metric, octavo, f"octavo_engine_{name}")
            for name in ("running_requests", "waiting_requests", "kv_blocks_used")
        ]
        answers = await asyncio.gather(*(chat(octavo, ignore_eos=True) for _ in range(10)))
        rows = audit_rows(octavo, at_least=42)

    assert idle == [0, 0, 0]
    assert [status for status, _ in answers] == [200] * 10
    served = [row["engine_id"] for row in rows if row["status"] == "length"]
    assert {served.count("engine-0"), served.count("engine-1")} <= set(range(3, 8))
