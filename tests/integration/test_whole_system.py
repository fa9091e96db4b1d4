"""The whole system as processes, with a stub in place of the model: departures, deaths and restarts.

The stub runner checks at every step that the blocks hold exactly the tokens of their sequence, so that a mix-up of
blocks would fail these tests, too.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from openai import AsyncOpenAI
from redis.asyncio import Redis

from libs.protogen.router.v1 import router_pb2, router_pb2_grpc
from libs.rpc import make_channel
from tests.integration.gateway_process import MODEL_NAME, write_keys
from tests.integration.observations import audit_rows, metric, seconds_until_no_block_is_held
from tests.integration.octavo import RunningOctavo, start_octavo
from tests.patience import PATIENCE_SECONDS

StartOctavo = Callable[..., AbstractContextManager[RunningOctavo]]

MODEL = "smollm2-135m-instruct"
STUB = ("--set", "worker.runner=stub", "--set", "worker.stub_step_seconds=0.02")
# What the issue allows after a client has left.
FREED_WITHIN_SECONDS = 1.0


def chat(content: str = "Name three primes.", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "ignore_eos": True} | fields


@asynccontextmanager
async def session_of(octavo: RunningOctavo) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(octavo.base_url, timeout=timeout) as session:
        yield session


async def complete(session: aiohttp.ClientSession, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with session.post("/v1/chat/completions", json=chat(**fields)) as response:
        return response.status, await response.json()


async def stream_to_its_end(session: aiohttp.ClientSession, started: asyncio.Event, **fields: Any) -> str:
    """Return how a stream ended: "done", "error event", "status N" or "cut"."""
    try:
        async with session.post("/v1/chat/completions", json=chat(stream=True, **fields)) as response:
            if response.status != 200:
                return f"status {response.status}"
            last = ""
            async for line in response.content:
                if line.startswith(b"data: "):
                    started.set()
                    last = line.decode()
            if last.strip() == "data: [DONE]":
                return "done"
            return "error event" if "error" in json.loads(last.removeprefix("data: ")) else "cut"
    except aiohttp.ClientError:
        return "cut"
    finally:
        started.set()


async def until_running(octavo: RunningOctavo, num_requests: int) -> None:
    """Wait until the engine runs so many requests."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await asyncio.to_thread(metric, octavo, "octavo_engine_running_requests") < num_requests:
            await asyncio.sleep(0.02)


async def until_watched(octavo: RunningOctavo, num_engines: int) -> None:
    """Wait until the router watches so many engines."""
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        make_channel(octavo.state()["processes"]["router"]["address"]) as channel,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        while True:
            listed = await stub.ListEngines(router_pb2.ListEnginesRequest())
            if sum(status.is_watched for status in listed.engines) == num_engines:
                return
            await asyncio.sleep(0.02)


async def served_again(session: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    """Return the first good answer after a death; everything until then must be a clear error."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                status, body = await complete(session, **({"max_tokens": 3} | fields))
            except aiohttp.ClientError:
                # Only when the gateway itself is away.
                await asyncio.sleep(0.1)
                continue
            if status == 200:
                return body
            assert status in (502, 503), (status, body)
            assert body["error"]["message"]
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("content", ["short", "long " * 7000])
async def test_a_client_that_leaves_frees_its_blocks_within_a_second(
    running_octavo: StartOctavo, stream: bool, content: str
) -> None:
    # A step of prefill takes 0.2 s here, so that the long prompt is cut off in the middle of its prefill.
    slow_prefill = ("--set", "worker.stub_seconds_per_token=0.0005", "--set", "engine.max_num_batched_tokens=256")
    with running_octavo(*STUB, *slow_prefill) as octavo:
        async with session_of(octavo) as session:
            body = chat(content, stream=stream, max_tokens=900)
            request = asyncio.create_task(_read_all(session, body))
            while not await asyncio.to_thread(metric, octavo, "octavo_engine_kv_blocks_used"):
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)

            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            seconds = await seconds_until_no_block_is_held(octavo)
        [row] = audit_rows(octavo, at_least=1)

    assert seconds < FREED_WITHIN_SECONDS
    assert row["status"] == "aborted"
    assert row["prompt_tokens"] > 0


async def _read_all(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    async with session.post("/v1/chat/completions", json=body) as response:
        await response.read()


@pytest.mark.parametrize("victim", ["worker-0", "engine-0", "router", "telemetry", "gateway"])
async def test_after_a_kill_nothing_hangs_and_the_next_request_is_served(
    running_octavo: StartOctavo, victim: str
) -> None:
    """ENG-01 of the known faults, where the process is dead."""
    with running_octavo(*STUB) as octavo:
        async with session_of(octavo) as session:
            events = [asyncio.Event() for _ in range(4)]
            streams = [
                asyncio.create_task(stream_to_its_end(session, event, content=f"stream {index}", max_tokens=200))
                for index, event in enumerate(events)
            ]
            plain = asyncio.create_task(complete(session, content="plain", max_tokens=200))
            for event in events:
                await event.wait()
            await until_running(octavo, 5)

            pid = octavo.kill(victim)
            async with asyncio.timeout(PATIENCE_SECONDS):
                ends = await asyncio.gather(*streams)
                plain_end: Any = (await asyncio.gather(plain, return_exceptions=True))[0]
            body = await served_again(session)
            octavo.wait_until_healthy(victim, after_pid=pid)
            await seconds_until_no_block_is_held(octavo)
        rows = audit_rows(octavo, at_least=6)

    assert body["usage"]["completion_tokens"] == 3
    if victim == "gateway":
        assert ends == ["cut"] * 4
        assert sum(row["status"] == "gateway_lost" for row in rows) == 5
    else:
        # Router and telemetry are not on the path of tokens; what engine or worker had goes on when it is back.
        assert ends == ["done"] * 4
        assert isinstance(plain_end, tuple)
        assert plain_end[0] == 200
        assert plain_end[1]["usage"]["completion_tokens"] == 200
        num_moved = sum(row["num_retries"] > 0 for row in rows)
        assert num_moved == (5 if victim in ("worker-0", "engine-0") else 0)
    assert len({row["request_id"] for row in rows}) == len(rows)


async def test_two_engines_share_the_work_and_one_survives_the_other(running_octavo: StartOctavo) -> None:
    with running_octavo(*STUB, "--engines", "2") as octavo:
        await until_watched(octavo, 2)
        async with session_of(octavo) as session:
            answers = await asyncio.gather(
                *(complete(session, content=f"question {index}", max_tokens=20) for index in range(16))
            )
            octavo.kill("engine-0")
            after = await served_again(session)
        rows = audit_rows(octavo, at_least=17)

    assert [status for status, _ in answers] == [200] * 16
    by_engine = [sum(row["engine_id"] == engine for row in rows) for engine in ("engine-0", "engine-1")]
    assert min(by_engine) >= 4
    assert after["choices"][0]["message"]["content"]


async def test_a_second_request_with_the_same_prefix_says_how_much_was_cached(running_octavo: StartOctavo) -> None:
    with running_octavo(*STUB) as octavo:
        async with session_of(octavo) as session:
            _, first = await complete(session, content="the same words again " * 30, max_tokens=3, temperature=0)
            _, second = await complete(session, content="the same words again " * 30, max_tokens=3, temperature=0)
        rows = audit_rows(octavo, at_least=2)

    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (first, second)]
    assert cached[0] == 0
    assert 0 < cached[1] < second["usage"]["prompt_tokens"]
    assert cached[1] % 16 == 0
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    assert sorted(row["cached_tokens"] for row in rows) == cached


async def test_two_hundred_prompts_with_common_beginnings_are_answered_as_without_a_cache(
    running_octavo: StartOctavo,
) -> None:
    """SKV-03 of the known faults (the real model's texts: test_real_model.py)."""
    # The pool holds a few prompts only, so that cached blocks are evicted and filled again all the time.
    quick = ("--set", "worker.runner=stub", "--set", "worker.stub_step_seconds=0", "--set", "engine.num_blocks=96")
    source = random.Random(20)
    beginnings = ["".join(source.choices("abcdefgh ", k=length)) for length in (60, 120, 180, 240)]
    prompts = [
        source.choice(beginnings) + "".join(source.choices("ijklmnop ", k=source.randint(60, 270)))
        for _ in range(200)
    ]

    async def answers(session: aiohttp.ClientSession, num_at_once: int) -> list[str]:
        order = source.sample(range(len(prompts)), len(prompts))
        places = asyncio.Semaphore(num_at_once)
        texts: dict[int, str] = {}

        async def ask(number: int) -> None:
            async with places:
                status, body = await complete(session, content=prompts[number], max_tokens=4, temperature=0)
            assert status == 200
            texts[number] = body["choices"][0]["message"]["content"]

        await asyncio.gather(*(ask(number) for number in order))
        return [texts[number] for number in range(len(prompts))]

    with running_octavo(*quick, "--set", "engine.enable_prefix_caching=false") as octavo:
        async with session_of(octavo) as session:
            without_cache = await answers(session, 8)
    with running_octavo(*quick) as octavo:
        async with session_of(octavo) as session:
            alone, together = await answers(session, 1), await answers(session, 8)
        cached = sum(row["cached_tokens"] for row in audit_rows(octavo, at_least=400))

    assert cached > 0
    assert alone == without_cache
    assert together == without_cache


async def test_tenants_share_a_declared_system_prompt_and_nothing_else(
    running_octavo: StartOctavo, tmp_path: Path
) -> None:
    system_prompt = "You are a careful assistant of a library in a small town. " * 10
    (tmp_path / "system.txt").write_text(system_prompt)
    write_keys(tmp_path / "keys", {"key-of-one": "one", "key-of-other": "other"})
    flags = (
        *("--set", f"gateway.shared_prompt_files={tmp_path / 'system.txt'}"),
        *("--set", f"gateway.api_keys_file={tmp_path / 'keys'}"),
    )
    question = "Which books about the sea do you have? " * 10

    async def cached_tokens(session: aiohttp.ClientSession, key: str, system: str) -> int:
        body = chat(question, max_tokens=2)
        body["messages"].insert(0, {"role": "system", "content": system})
        headers = {"authorization": f"Bearer {key}"}
        async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
            usage = (await response.json())["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

    with running_octavo(*STUB, *flags) as octavo:
        async with session_of(octavo) as session:
            first = await cached_tokens(session, "key-of-one", system_prompt)
            shared = await cached_tokens(session, "key-of-other", system_prompt)
            own = await cached_tokens(session, "key-of-other", system_prompt)
            await cached_tokens(session, "key-of-one", "Another prompt, that nobody has declared. " * 10)
            undeclared = await cached_tokens(
                session, "key-of-other", "Another prompt, that nobody has declared. " * 10
            )

    assert first == 0
    assert 0 < shared < own
    assert undeclared == 0


async def test_the_registries_name_the_node_and_the_prefixes_it_holds(running_octavo: StartOctavo) -> None:
    with running_octavo(*STUB) as octavo:
        redis = Redis.from_url(octavo.state()["redis_url"], decode_responses=True)
        async with session_of(octavo) as session, redis:
            await complete(session, content="words that fill some blocks " * 20, max_tokens=3)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not (held := [key async for key in redis.scan_iter("prompt_cache_manifest:*")]):
                    await asyncio.sleep(0.1)
                while not (routed := [key async for key in redis.scan_iter("prompt_prefix_cache:*")]):
                    await asyncio.sleep(0.1)
            node = await redis.hgetall("gpu_cluster_nodes:engine-0")
            row = await redis.hgetall(held[0])
            entry = await redis.hgetall(routed[0])

    assert {
        *("node_id", "gpu_type", "total_vram_bytes", "free_kv_cache_blocks", "active_slots"),
        *("tensor_parallel_size", "address", "model_name", "incarnation"),
    } <= node.keys()
    assert row.keys() == {"prefix_hash", "node_id", "block_indices", "last_accessed"}
    assert entry.keys() == {"prefix_hash", "node_id", "token_length", "last_accessed_at"}
    assert len(row["prefix_hash"]) == len(entry["prefix_hash"]) == 64
    assert row["node_id"] == entry["node_id"] == "engine-0"


async def test_sigterm_finishes_streams_and_flushes_every_row(running_octavo: StartOctavo) -> None:
    """ENG-03 of the known faults."""
    with running_octavo(*STUB) as octavo:
        async with session_of(octavo) as session:
            started = asyncio.Event()
            stream = asyncio.create_task(stream_to_its_end(session, started, max_tokens=100))
            await started.wait()
            octavo.process.terminate()
            end = await stream
        exit_code = octavo.wait_for_exit()

    assert end == "done"
    assert exit_code == 0, octavo.stderr_tail()
    with start_octavo(octavo.data_dir, *STUB) as again:
        rows = audit_rows(again, at_least=1)
    assert [row["status"] for row in rows] == ["length"]


async def complete_thrice(client: AsyncOpenAI, prompt: str | list[str]) -> list[str]:
    """Return three drawn choices for each prompt."""
    completion = await client.completions.create(model=MODEL, prompt=prompt, seed=7, max_tokens=12, n=3)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 12 * len(completion.choices)
    return [choice.text for choice in completion.choices]


async def check_scores(client: AsyncOpenAI) -> None:
    """A prompt is scored alike when it is computed, partly found in the cache, and with or without an answer."""

    async def scores(prompt: list[int], **fields: Any) -> list[float | None]:
        completion = await client.completions.create(
            model=MODEL, prompt=prompt, echo=True, logprobs=1, temperature=0, **fields
        )
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        return list(logprobs.token_logprobs)

    prompt = list(range(100, 140))
    first = await scores(prompt, max_tokens=0)
    other = await scores([*prompt[:32], 7, 8, 9], max_tokens=0)
    again = await scores(prompt, max_tokens=0)
    with_answer = await scores(prompt, max_tokens=1)

    assert len(first) == 40
    assert None not in first[1:]
    assert first == again == with_answer[:40]
    assert first[:32] == other[:32]
    assert len(with_answer) == 41

    chat: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "n": 2,
        "seed": 3,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = await client.chat.completions.create(**chat)
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    async for chunk in await client.chat.completions.create(stream=True, **chat):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed[choice.index] += choice.logprobs.content or ()
    for answer in whole.choices:
        assert answer.logprobs is not None
        assert answer.logprobs.content is not None
        assert answer.logprobs.content == streamed[answer.index]
        assert [len(entry.top_logprobs) for entry in answer.logprobs.content] == [2] * 6
        assert all(entry.logprob <= 0 for entry in answer.logprobs.content)


async def test_the_openai_client_lists_completes_and_streams(running_octavo: StartOctavo) -> None:
    with running_octavo(*STUB) as octavo:
        async with AsyncOpenAI(base_url=f"{octavo.base_url}/v1", api_key="none", max_retries=0) as client:
            models = await client.models.list()
            model = await client.models.retrieve(MODEL)
            completion = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0
            )
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            prompts = ["One two three", "Four five six seven", "Eight"]
            together = await complete_thrice(client, prompts)
            alone = [await complete_thrice(client, prompt) for prompt in prompts]
            await check_scores(client)

    # A drawn choice depends on seed, place and text alone, not on what it was asked together with.
    assert together == [text for texts in alone for text in texts]
    assert len(set(together)) == 9
    assert [entry.id for entry in models.data] == [MODEL]
    assert model.id == MODEL
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == completion.choices[0].message.content
    assert chunks[-1].usage is not None
    assert completion.usage is not None
    assert chunks[-1].usage.completion_tokens == completion.usage.completion_tokens == 8


async def test_a_frozen_worker_turns_readiness_off_and_heals(running_octavo: StartOctavo) -> None:
    """ENG-01 of the known faults, where the process is frozen."""
    # A frozen worker is connected all the time: only a step that is not answered shows it.
    limits = ("--set", "engine.stall_seconds=1", "--set", "engine.step_timeout_seconds=4")
    with running_octavo(*STUB, *limits) as octavo:
        async with session_of(octavo) as session:
            events = [asyncio.Event() for _ in range(3)]
            streams = [
                asyncio.create_task(stream_to_its_end(session, event, content=f"stream {index}", max_tokens=200))
                for index, event in enumerate(events)
            ]
            for event in events:
                await event.wait()

            octavo.kill("worker-0", signal.SIGSTOP)
            await until_readiness_is(session, 503)
            octavo.wait_for_stderr("workers lost")
            octavo.kill("worker-0", signal.SIGCONT)
            async with asyncio.timeout(PATIENCE_SECONDS):
                ends = await asyncio.gather(*streams)
            await until_readiness_is(session, 200)
            status, _ = await complete(session, max_tokens=3)

    assert ends == ["done"] * 3
    assert status == 200


async def test_an_idle_frozen_worker_turns_readiness_off(running_octavo: StartOctavo) -> None:
    limits = ("--set", "engine.stall_seconds=1", "--set", "engine.heartbeat_seconds=0.5")
    with running_octavo(*STUB, *limits) as octavo:
        async with session_of(octavo) as session:
            octavo.kill("worker-0", signal.SIGSTOP)
            await until_readiness_is(session, 503)
            octavo.kill("worker-0", signal.SIGCONT)
            await until_readiness_is(session, 200)
            body = await served_again(session)

    assert body["choices"][0]["finish_reason"] == "length"


async def until_readiness_is(session: aiohttp.ClientSession, expected: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            async with session.get("/readyz") as response:
                if response.status == expected:
                    return
            await asyncio.sleep(0.1)


async def test_other_dialects_are_served_by_the_whole_system(running_octavo: StartOctavo) -> None:
    question = "Name three primes."
    with running_octavo(*STUB) as octavo:
        async with (
            anthropic.AsyncAnthropic(
                base_url=octavo.base_url, api_key="none", _strict_response_validation=True
            ) as one,
            openai.AsyncOpenAI(
                base_url=f"{octavo.base_url}/v1", api_key="none", _strict_response_validation=True
            ) as other,
        ):
            turns: list[anthropic.types.MessageParam] = [{"role": "user", "content": question}]
            async with one.messages.stream(model=MODEL_NAME, max_tokens=8, messages=turns) as messages:
                message = await messages.get_final_message()
            events = [
                event
                async for event in await other.responses.create(
                    model=MODEL_NAME, input=question, max_output_tokens=8, stream=True
                )
            ]

    assert message.usage.output_tokens > 0
    assert message.stop_reason in ("max_tokens", "end_turn")
    last = events[-1]
    # The stub seldom ends by itself.
    assert last.type in ("response.incomplete", "response.completed")
    assert last.response.usage is not None
    assert last.response.usage.output_tokens > 0
