"""Speculation over the real wires: whatever is drafted, a client gets what it gets without.

SKV-10 and SKV-11 of the known faults (vllm-project/vllm#47616, #41758), as far as the engine and its worker go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from libs.obs.metrics import EngineMetrics
from libs.protogen.generation.v1 import generation_pb2
from services.engine.config import Speculation
from services.engine.core.scheduler_config import Admission
from services.worker.config import RunnerKind, WorkerConfig
from services.worker.model_runner import TorchRunner
from services.worker.step import ModelRunner
from services.worker.stub_runner import StubRunner
from tests.contract.test_engine import running_engine
from tests.contract.test_engine_logprobs import entries_of, gateway_to
from tests.fakes.fake_worker import EOS_TOKEN_ID, FakeWorker
from tests.unit.worker.kernels.native_models import needs_kernels, rounded_llama
from tests.unit.worker.small_models import END_TOKEN_ID, save_model

# Prompts that repeat themselves; a small vocabulary, so that the outputs do too.
PHRASES = {"short": [30, 31], "long": [40, 41, 42, 43, 44, 45, 46], "one": [33]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(rounded_llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[pytest.param("model", marks=needs_kernels), "stub"])
def runner(request: pytest.FixtureRequest, folder: Path) -> ModelRunner:
    if request.param == "stub":
        # Two ids, so that what follows is guessed right about every second time.
        return StubRunner(WorkerConfig(runner=RunnerKind.STUB, stub_max_model_len=512, stub_num_token_ids=2))
    return TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="8MiB", num_threads=2))


@dataclass
class Outcome:
    """What a gateway got of some requests; equal for engines that say the same."""

    tokens: dict[str, list[list[int]]]
    logprobs: dict[str, list[object]]
    ends: dict[str, list[tuple[int, int, int]]]


async def outcome_of(
    runner: ModelRunner,
    requests: Mapping[str, generation_pb2.Submit],
    metrics: EngineMetrics | None = None,
    **settings: object,
) -> Outcome:
    """Run the requests at once; each must end well."""
    async with gateway_to(runner, metrics=metrics, **settings) as (_, gateway):
        for request_id, submit in requests.items():
            submit.request_id = request_id
            await gateway.stream.send(generation_pb2.GenerateRequest(submit=submit))
        num_choices = sum(len(submit.choices) for submit in requests.values())
        await gateway.until(lambda: len(gateway.ends) == num_choices)
    entries = entries_of(gateway)
    ends: dict[str, list[tuple[int, int, int]]] = {}
    for request_id, handles in gateway.handles.items():
        ends[request_id] = []
        for end in map(gateway.ends.__getitem__, handles):
            assert isinstance(end, generation_pb2.Finished), end
            ends[request_id].append((end.reason, end.stop_token_id, end.usage.num_output_tokens))
    return Outcome(
        tokens={name: [gateway.tokens[handle] for handle in handles] for name, handles in gateway.handles.items()},
        logprobs={
            name: [(entries[handle].output, entries[handle].prompt) for handle in handles]
            for name, handles in gateway.handles.items()
        },
        ends=ends,
    )


async def num_accepted_where_equal(
    runner: ModelRunner, requests: Mapping[str, generation_pb2.Submit], **settings: object
) -> float:
    """Run with and without speculation and compare; returns how many drafts were accepted."""
    expected = await outcome_of(runner, requests, None, **settings)
    registry = CollectorRegistry()
    came = await outcome_of(runner, requests, EngineMetrics(registry), speculation=Speculation.NGRAM, **settings)

    assert came == expected
    num_drafts = registry.get_sample_value("octavo_engine_draft_tokens_total")
    num_accepted = registry.get_sample_value("octavo_engine_accepted_draft_tokens_total")
    assert num_drafts is not None
    assert num_accepted is not None
    assert num_accepted <= num_drafts
    return num_accepted


def submit(
    prompt: list[int],
    max_output_tokens: int = 40,
    *,
    num_choices: int = 1,
    **params: Any,  # Any: fields of a message.
) -> generation_pb2.Submit:
    return generation_pb2.Submit(
        prompt_token_ids=prompt,
        sampling_params=generation_pb2.SamplingParams(
            max_output_tokens=max_output_tokens,
            **({"ignore_eos": True} | params),
        ),
        choices=[generation_pb2.ChoiceState()] * num_choices,
    )


def prompt_of(name: str, num_tokens: int = 40) -> list[int]:
    phrase = PHRASES[name]
    return (phrase * math.ceil(num_tokens / len(phrase)))[:num_tokens]


@pytest.mark.parametrize(("enable_prefix_caching", "max_steps_in_flight"), [(True, 2), (False, 2), (True, 1)])
async def test_tokens_and_logprobs_are_those_without_speculation(
    runner: ModelRunner, enable_prefix_caching: bool, max_steps_in_flight: int
) -> None:
    kinds: dict[str, dict[str, Any]] = {"greedy": {}, "drawn": {"temperature": 0.6, "seed": 5}, "again": {}}
    requests = {
        f"{name} {kind}": submit(prompt_of(name), num_logprobs=2, **params)
        for name in PHRASES
        for kind, params in kinds.items()
    }

    num_accepted = await num_accepted_where_equal(
        runner,
        requests,
        enable_prefix_caching=enable_prefix_caching,
        max_steps_in_flight=max_steps_in_flight,
        num_draft_tokens=5,
        min_ngram_tokens=1,
    )

    assert num_accepted > 20


async def test_choices_prompt_logprobs_and_prior_output(runner: ModelRunner) -> None:
    resumed = submit(prompt_of("short"), num_logprobs=0)
    resumed.choices[0].output_token_ids.extend(PHRASES["short"] * 4)
    requests = {
        "choices": submit(prompt_of("long", 37), num_choices=3, temperature=1.0, seed=8, num_logprobs=1),
        "prompt": submit(prompt_of("one", 33), num_prompt_logprobs=1, num_logprobs=1),
        "resumed": resumed,
    }

    assert await num_accepted_where_equal(runner, requests, min_ngram_tokens=1, max_num_batched_tokens=24) > 0


async def test_preempted_sequences_that_draft_go_on_as_if_nothing_had_happened(runner: ModelRunner) -> None:
    requests = {f"r{index}": submit(prompt_of("short", 30 + 7 * index), 40, num_logprobs=1) for index in range(6)}

    num_accepted = await num_accepted_where_equal(
        runner,
        requests,
        num_blocks=14,
        watermark_fraction=0.0,
        admission=Admission.WATERMARK,
        max_num_batched_tokens=24,
        max_model_len=200,
        min_ngram_tokens=1,
    )

    assert num_accepted > 0


async def test_limits_and_stop_ids_inside_drafts(runner: ModelRunner) -> None:
    plain = (await outcome_of(runner, {"a": submit(prompt_of("short"), 40)})).tokens["a"][0]
    requests = {
        **{f"at most {count}": submit(prompt_of("short"), count, num_logprobs=0) for count in range(1, 7)},
        **{f"stop at {place}": submit(prompt_of("short"), 40, stop_token_ids=[plain[place]]) for place in range(9)},
    }

    await num_accepted_where_equal(runner, requests, num_draft_tokens=4, min_ngram_tokens=1)


async def test_no_position_lies_behind_the_longest_sequence(runner: ModelRunner) -> None:
    requests = {f"{left} left": submit(prompt_of("short", 128 - left), left) for left in (1, 2, 3, 4)}

    # A worker refuses a draft beyond the limit, which would break the engine's stream.
    await num_accepted_where_equal(runner, requests, num_draft_tokens=8, max_model_len=128)


@needs_kernels
async def test_least_lengths_bans_and_penalties(folder: Path) -> None:
    runner = TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="8MiB", num_threads=2))
    plain = (await outcome_of(runner, {"a": submit(prompt_of("short"), 40)})).tokens["a"][0]
    ends: dict[str, Any] = {
        "ignore_eos": False,
        "stop_token_ids": [plain[1], plain[3]],
        "logit_bias": {END_TOKEN_ID: 3.0},
    }
    requests = {
        **{f"at least {n}": submit(prompt_of("short"), 40, min_output_tokens=n, **ends) for n in (0, 3, 11)},
        "bans": submit(
            prompt_of("long"),
            bad_words=[generation_pb2.TokenSequence(token_ids=plain[4:6])],
            repetition_penalty=1.05,
        ),
        "penalties": submit(prompt_of("one"), frequency_penalty=0.05, presence_penalty=0.02, num_logprobs=2),
        "few": submit(prompt_of("one"), allowed_token_ids=[30, 31, 32], temperature=1.0, seed=3),
    }

    assert await num_accepted_where_equal(runner, requests, min_ngram_tokens=1, num_draft_tokens=4) > 0


async def test_a_grammar_holds_drafted_output_and_ends_it_where_it_ends() -> None:
    runner = StubRunner(WorkerConfig(runner=RunnerKind.STUB, stub_max_model_len=512))
    grammar = generation_pb2.Grammar(regex="(ha ){4,12}")
    requests = {
        f"r{seed}": submit(prompt_of("short"), 60, grammar=grammar, temperature=1.0, seed=seed, ignore_eos=False)
        for seed in range(6)
    }

    assert await num_accepted_where_equal(runner, requests, min_ngram_tokens=1) > 0


async def test_the_stub_repeats_itself_when_it_knows_one_word_only() -> None:
    runner = StubRunner(WorkerConfig(runner=RunnerKind.STUB, stub_max_model_len=512, stub_num_token_ids=1))
    registry = CollectorRegistry()

    outcome = await outcome_of(
        runner, {"a": submit([50, 51, 52], 60)}, EngineMetrics(registry), speculation=Speculation.NGRAM
    )

    assert len(set(outcome.tokens["a"][0])) == 1
    steps, accepted = (
        registry.get_sample_value(f"octavo_engine_{name}_total") or 0 for name in ("steps", "accepted_draft_tokens")
    )
    assert accepted > 40
    assert steps + accepted == pytest.approx(60, abs=3)
    assert np.array_equal(outcome.tokens["a"][0][:1] * 60, outcome.tokens["a"][0])


async def test_an_end_token_is_never_drafted_and_ends_the_output_where_it_comes() -> None:
    worker = FakeWorker(period=3, eos_after_tokens=20)

    async with (
        running_engine(worker, speculation=Speculation.NGRAM, num_draft_tokens=4) as engine,
        engine.gateway() as gateway,
    ):
        await gateway.submit("a", [11, 12, 10, EOS_TOKEN_ID] * 3, 60)
        end = await gateway.end_of("a")

    assert isinstance(end, generation_pb2.Finished)
    assert (end.reason, end.stop_token_id) == (generation_pb2.FINISH_REASON_STOP, EOS_TOKEN_ID)
    assert gateway.tokens_of("a") == [*([11, 12, 10] * 7)[:19], EOS_TOKEN_ID]
    drafts = [token_id for step in worker.steps for token_id in step.draft_token_ids]
    assert set(drafts) == {10, 11, 12}
    assert len(worker.steps) < 16


async def test_a_sequence_with_nothing_to_draft_has_two_steps_in_flight() -> None:
    worker = FakeWorker(period=None, holds_answers=True)

    async with (
        running_engine(worker, speculation=Speculation.NGRAM) as engine,
        engine.gateway() as gateway,
    ):
        # Nothing that it says was said before, so it goes on without drafts.
        await gateway.submit("a", [21, 22, 23], 30)
        await gateway.end_of("a")

    assert worker.num_overlapped_steps > 20
    assert not any(step.draft_token_ids for step in worker.steps)
