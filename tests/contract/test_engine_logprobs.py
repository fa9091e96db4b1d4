"""Log-probabilities over the real wires: a gateway's stream, the engine, and a worker with a model or the stub."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from libs.errors import InvalidRequest
from libs.obs.metrics import WorkerMetrics
from libs.protogen.generation.v1 import generation_pb2
from services.engine.core.scheduler_config import Admission
from services.worker.config import RunnerKind, WorkerConfig
from services.worker.model_runner import TorchRunner
from services.worker.servicer import WorkerServicer, registration
from services.worker.step import ModelRunner
from services.worker.stub_runner import StubRunner
from tests.contract.test_engine import Engine, Gateway, error_of, running_engine, until_idle
from tests.unit.worker.kernels.native_models import rounded_llama
from tests.unit.worker.small_models import VOCAB_SIZE, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(rounded_llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["model", "stub"])
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    if request.param == "stub":
        return StubRunner(WorkerConfig(runner=RunnerKind.STUB, stub_max_model_len=512))
    return TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="8MiB", num_threads=2))


@dataclass
class Entries:
    """The log-probabilities that came for one handle, a tuple for each token."""

    output: list[tuple[object, ...]] = field(default_factory=list)
    prompt: list[tuple[object, ...]] = field(default_factory=list)


def entries_of(gateway: Gateway) -> dict[int, Entries]:
    """Read all messages of a gateway as its successor would."""
    entries: dict[int, Entries] = defaultdict(Entries)
    for message in gateway.messages:
        count_of = dict(zip(message.handles, message.num_tokens, strict=True))
        output = iter(_tuples(message.output_logprobs.tokens))
        for handle in message.output_logprobs.handles:
            entries[handle].output += [next(output) for _ in range(count_of[handle])]
        assert not list(output)
        prompt = iter(_tuples(message.prompt_logprobs.tokens))
        for handle, count in zip(message.prompt_logprobs.handles, message.prompt_logprobs.num_tokens, strict=True):
            assert not gateway_has_tokens_before(gateway, message, handle)
            entries[handle].prompt += [next(prompt) for _ in range(count)]
        assert not list(prompt)
    return entries


def gateway_has_tokens_before(gateway: Gateway, message: generation_pb2.GenerateResponse, handle: int) -> bool:
    return any(handle in earlier.handles for earlier in gateway.messages[: gateway.messages.index(message)])


def _tuples(tokens: generation_pb2.TokenLogprobs) -> list[tuple[object, ...]]:
    entries: list[tuple[object, ...]] = []
    first = 0
    for logprob, rank, count in zip(tokens.logprobs, tokens.ranks, tokens.num_alternatives, strict=True):
        rest = slice(first, first + count)
        entries.append(
            (logprob, rank, tuple(tokens.alternative_token_ids[rest]), tuple(tokens.alternative_logprobs[rest]))
        )
        first += count
    return entries


def prompt_of(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(20, VOCAB_SIZE, count).tolist()
    return tokens


def params_of(max_output_tokens: int = 4, **fields: int | float) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        max_output_tokens=max_output_tokens,
        ignore_eos=True,
        **fields,  # type: ignore[arg-type]
    )


@asynccontextmanager
async def gateway_to(runner: ModelRunner, **settings: object) -> AsyncIterator[tuple[Engine, Gateway]]:
    servicer = WorkerServicer(runner, WorkerMetrics(CollectorRegistry()), model_name="small")
    try:
        async with (
            running_engine(registration=registration(servicer), **settings) as engine,  # type: ignore[arg-type]
            engine.gateway() as gateway,
        ):
            yield engine, gateway
    finally:
        await servicer.close()


async def run(
    gateway: Gateway, request_id: str, prompt: Sequence[int], params: generation_pb2.SamplingParams
) -> generation_pb2.Finished:
    await gateway.submit(request_id, list(prompt), params.max_output_tokens, sampling_params=params)
    end = await gateway.end_of(request_id)
    assert isinstance(end, generation_pb2.Finished)
    return end


# SKV-04 of the known faults (vllm-project/vllm#8268): a cache hit skipped the positions whose logits are needed.
@pytest.mark.parametrize("max_num_batched_tokens", [512, 8])
async def test_prompt_logprobs_of_a_cached_prompt_are_those_of_the_uncached(
    runner: ModelRunner, max_num_batched_tokens: int
) -> None:
    prompt = prompt_of(1, 40)
    other = [*prompt[:32], *prompt_of(2, 8)]
    params = params_of(num_prompt_logprobs=1, num_logprobs=1)

    async with gateway_to(runner, max_num_batched_tokens=max_num_batched_tokens) as (_, gateway):
        for request_id, token_ids in (("first", prompt), ("second", prompt), ("other", other), ("third", prompt)):
            end = await run(gateway, request_id, token_ids, params)
            assert end.usage.num_cached_tokens == 0
        plain = await run(gateway, "plain", prompt, params_of())
    async with gateway_to(runner, enable_prefix_caching=False) as (_, uncached):
        await run(uncached, "prompt", prompt, params)
        await run(uncached, "other", other, params)

    entries, expected = entries_of(gateway), entries_of(uncached)
    for request_id, reference in (
        ("first", "prompt"),
        ("second", "prompt"),
        ("other", "other"),
        ("third", "prompt"),
    ):
        came = entries[gateway.handles[request_id][0]]
        assert len(came.prompt) == 39
        assert came == expected[uncached.handles[reference][0]]
    assert plain.usage.num_cached_tokens == 32
    assert gateway.tokens_of("plain") == gateway.tokens_of("first")


# SKV-02 of the known faults (vllm-project/vllm#11186), as far as log-probabilities go.
@pytest.mark.parametrize("count", [16, 31, 32, 33])
async def test_output_logprobs_do_not_depend_on_the_prefix_cache(runner: ModelRunner, count: int) -> None:
    prompt = prompt_of(count, count)

    async with gateway_to(runner) as (_, gateway):
        ends = [await run(gateway, f"r{index}", prompt, params_of(num_logprobs=3)) for index in range(3)]

    entries = entries_of(gateway)
    came = [entries[gateway.handles[f"r{index}"][0]].output for index in range(3)]
    assert came[0] == came[1] == came[2]
    assert len(came[0]) == 4
    assert all(end.usage.num_cached_tokens < count for end in ends)
    assert ends[2].usage.num_cached_tokens == (count - 1) // 16 * 16


async def test_choices_share_one_prompt_report_and_have_their_own_output(runner: ModelRunner) -> None:
    prompt = prompt_of(3, 37)
    submit = generation_pb2.Submit(
        request_id="r",
        prompt_token_ids=prompt,
        sampling_params=params_of(6, num_prompt_logprobs=2, num_logprobs=0, temperature=1.0, seed=5),
        choices=[generation_pb2.ChoiceState()] * 3,
    )

    async with gateway_to(runner) as (engine, gateway):
        await gateway.stream.send(generation_pb2.GenerateRequest(submit=submit))
        await gateway.until(lambda: len(gateway.ends) == 3)
        load = await until_idle(engine)

    entries = entries_of(gateway)
    assert [len(entries[handle].prompt) for handle in gateway.handles["r"]] == [36, 0, 0]
    assert [len(entries[handle].output) for handle in gateway.handles["r"]] == [6, 6, 6]
    assert load.num_available_blocks == load.num_blocks


async def test_preemption_loses_and_repeats_no_logprobs(runner: ModelRunner) -> None:
    prompts = {f"r{index}": prompt_of(index, 30 + 7 * index) for index in range(6)}
    params = params_of(40, num_prompt_logprobs=1, num_logprobs=1)

    async with gateway_to(
        runner,
        num_blocks=14,
        watermark_fraction=0.0,
        admission=Admission.WATERMARK,
        max_num_batched_tokens=24,
        max_model_len=200,
    ) as (_, gateway):
        for request_id, prompt in prompts.items():
            await gateway.submit(request_id, prompt, 40, sampling_params=params)
        ends = [await gateway.end_of(request_id) for request_id in prompts]
    async with gateway_to(runner) as (_, calm):
        for request_id, prompt in prompts.items():
            await run(calm, request_id, prompt, params)

    assert sum(end.usage.num_preemptions for end in ends) > 0
    entries, expected = entries_of(gateway), entries_of(calm)
    for request_id in prompts:
        assert gateway.tokens_of(request_id) == calm.tokens_of(request_id)
        assert entries[gateway.handles[request_id][0]] == expected[calm.handles[request_id][0]]


async def test_more_logprobs_than_the_limit_are_refused(runner: ModelRunner) -> None:
    async with gateway_to(runner) as (_, gateway):
        await gateway.submit("r", [20], 2, sampling_params=params_of(2, num_logprobs=49_152))
        error = error_of(await gateway.end_of("r"))

    assert isinstance(error, InvalidRequest)
    assert "num_logprobs must be from 0 to 20, not 49152" in str(error)


async def test_parameters_that_leave_no_token_end_the_request_and_keep_the_prefix_of_others(folder: Path) -> None:
    runner = TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="8MiB", num_threads=2))
    prompt = prompt_of(9, 40)
    # Only the end token is allowed, and that not yet.
    nothing = generation_pb2.SamplingParams(max_output_tokens=4, min_output_tokens=2, allowed_token_ids=[1])

    async with gateway_to(runner) as (_, gateway):
        await run(gateway, "first", prompt, params_of())
        await gateway.submit("bad", prompt, 4, sampling_params=nothing)
        error = error_of(await gateway.end_of("bad"))
        after = await run(gateway, "after", prompt, params_of())

    assert isinstance(error, InvalidRequest)
    assert "No token may come next" in str(error)
    assert after.usage.num_cached_tokens == 32
