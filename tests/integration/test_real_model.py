"""The whole system with the real model: the same text as transformers, whatever else is being served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager

import pytest
from openai import AsyncOpenAI

from tests.integration.observations import audit_rows, metric, seconds_until_no_block_is_held
from tests.integration.octavo import RunningOctavo
from tests.integration.reference import Reference, references

StartOctavo = Callable[..., AbstractContextManager[RunningOctavo]]

MODEL = "smollm2-135m-instruct"
FP32 = ("--set", "worker.dtype=float32")
# The longest conversation needs 105 blocks of 16 tokens, so that few others fit beside it.
FEW_BLOCKS = (
    *("--set", "engine.num_blocks=112"),
    *("--set", "engine.watermark_fraction=0"),
    *("--set", "engine.admission=watermark"),
)
SMALL_BUDGET = ("--set", "engine.max_num_batched_tokens=64")
NO_PREFIX_CACHE = ("--set", "engine.enable_prefix_caching=false")


@asynccontextmanager
async def client_of(octavo: RunningOctavo) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{octavo.base_url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


async def greedy_answer(client: AsyncOpenAI, reference: Reference) -> tuple[str, int]:
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=reference.messages,
        max_tokens=64,
        temperature=0,
    )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(reference.prompt_token_ids)
    return completion.choices[0].message.content or "", completion.usage.completion_tokens


async def assert_answers_equal_transformers(client: AsyncOpenAI) -> None:
    expected = references()

    answers = await asyncio.gather(*(greedy_answer(client, reference) for reference in expected))

    for (text, num_tokens), reference in zip(answers, expected, strict=True):
        assert text == reference.text
        assert num_tokens == len(reference.output_token_ids)


async def seeded_answer(client: AsyncOpenAI, reference: Reference, seed: int) -> str:
    text = ""
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=reference.messages,
        max_tokens=64,
        temperature=0.9,
        top_p=0.95,
        seed=seed,
        stream=True,
    )
    async for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    return text


async def test_twenty_at_once_give_the_text_of_transformers(running_octavo: StartOctavo) -> None:
    with running_octavo(*FP32) as octavo:
        async with client_of(octavo) as client:
            await assert_answers_equal_transformers(client)
        await seconds_until_no_block_is_held(octavo)
        rows = audit_rows(octavo, at_least=20)

    assert len(rows) == 20
    assert all(row["num_preemptions"] == 0 for row in rows)


@pytest.mark.slow
async def test_a_small_budget_and_preemption_change_no_text_and_no_draw(running_octavo: StartOctavo) -> None:
    with running_octavo(*FP32, *FEW_BLOCKS, *SMALL_BUDGET) as octavo:
        async with client_of(octavo) as client:
            alone = await seeded_answer(client, references()[7], seed=11)
            _, *others = await asyncio.gather(
                assert_answers_equal_transformers(client),
                *(seeded_answer(client, references()[7], seed=11) for _ in range(8)),
                *(seeded_answer(client, references()[index], seed=index) for index in range(8)),
            )
        await seconds_until_no_block_is_held(octavo)
        rows = audit_rows(octavo, at_least=37)

    assert alone
    assert others[:8] == [alone] * 8
    assert len({row["request_id"] for row in rows}) == 37
    assert sum(row["num_preemptions"] for row in rows) > 0
    assert sum(row["cached_tokens"] for row in rows) > 0


async def test_sixty_four_streams_lose_nothing_and_leave_no_block(running_octavo: StartOctavo) -> None:
    """SKV-06 of the known faults, over HTTP."""
    prompts = references()[:12]

    async def stream(client: AsyncOpenAI, index: int) -> tuple[int, str | None]:
        num_tokens, finish_reason = 0, None
        events = await client.chat.completions.create(
            model=MODEL,
            messages=prompts[index % len(prompts)].messages,
            max_tokens=4 + index % 40,
            temperature=0.7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in events:
            if chunk.choices and chunk.choices[0].finish_reason:
                finish_reason = chunk.choices[0].finish_reason
            if chunk.usage is not None:
                num_tokens = chunk.usage.completion_tokens
        return num_tokens, finish_reason

    # The accounts of blocks are checked after every step, and again by the gauges when all is idle.
    with running_octavo("--set", "engine.integrity_interval_steps=1") as octavo:
        async with client_of(octavo) as client:
            results = await asyncio.gather(*(stream(client, index) for index in range(64)))
        await seconds_until_no_block_is_held(octavo)
        rows = audit_rows(octavo, at_least=64)
        running = metric(octavo, "octavo_engine_running_requests")
        has_fault = "integrity fault" in octavo.stderr()

    assert results == [(4 + index % 40, "length") for index in range(64)]
    assert len({row["request_id"] for row in rows}) == 64
    assert sum(row["completion_tokens"] for row in rows) == sum(tokens for tokens, _ in results)
    assert running == 0
    assert not has_fault


@pytest.mark.slow
@pytest.mark.parametrize("flags", [NO_PREFIX_CACHE, SMALL_BUDGET, FEW_BLOCKS + NO_PREFIX_CACHE])
async def test_other_settings_change_no_text(running_octavo: StartOctavo, flags: tuple[str, ...]) -> None:
    with running_octavo(*FP32, *flags) as octavo:
        async with client_of(octavo) as client:
            await assert_answers_equal_transformers(client)


@pytest.mark.slow
async def test_one_after_the_other_gives_the_text_of_transformers(running_octavo: StartOctavo) -> None:
    with running_octavo(*FP32) as octavo:
        async with client_of(octavo) as client:
            for reference in references():
                assert (await greedy_answer(client, reference))[0] == reference.text


@pytest.mark.slow
async def test_bf16_differs_from_fp32_only_at_near_ties(running_octavo: StartOctavo) -> None:
    # bf16 keeps 8 bits: logits of size 20 move by up to about 0.4 over 30 layers.
    near_tie = 0.5
    with running_octavo() as octavo:
        async with client_of(octavo) as client:
            answers = await asyncio.gather(*(greedy_answer(client, reference) for reference in references()))

    for (text, _), reference in zip(answers, references(), strict=True):
        if text != reference.text:
            ids = reference.output_token_ids
            shared = next(
                index
                for index in range(len(ids) + 1)
                if index == len(ids)
                or not text.startswith(Reference(reference.messages, [], ids[: index + 1], []).text)
            )
            assert shared < len(ids), "the answer goes on where the reference ends"
            assert min(reference.gaps[max(0, shared - 1) : shared + 1]) < near_tie


@pytest.mark.slow
async def test_all_features_change_no_text_of_fifty_prompts(running_octavo: StartOctavo) -> None:
    all_off = (
        *NO_PREFIX_CACHE,
        *("--set", "engine.max_steps_in_flight=1"),
        *("--set", "engine.admission=watermark"),
        *("--set", "engine.max_prefill_share=1"),
    )
    few_blocks = ("--set", "engine.num_blocks=160", "--set", "engine.target_itl=0.2")
    answers = []

    for flags in (all_off, few_blocks):
        with running_octavo(*FP32, *flags) as octavo:
            async with client_of(octavo) as client:
                answers.append(await asyncio.gather(*(short_answer(client, number) for number in range(50))))

    assert answers[0] == answers[1]


async def short_answer(client: AsyncOpenAI, number: int) -> str:
    passages = references()[10 + number % 6].messages[0]["content"]
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"{passages}\n\nTell me more about point {number}."}],
        max_tokens=32,
        temperature=0,
    )
    return completion.choices[0].message.content or ""
