"""Runners with drafts: whatever is drafted, the same output comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from libs.errors import InternalError
from services.worker.config import KernelChoice, RunnerKind, WeightsType, WorkerConfig
from services.worker.kernels.cpu.extension import load_extension
from services.worker.model_runner import TorchRunner
from services.worker.step import LoadedModel, ModelRunner, SamplingParams
from services.worker.stub_runner import StubRunner
from tests.unit.worker.kernels.native_models import rounded_llama
from tests.unit.worker.small_engine import Running, SmallEngine, load_request, new_sequence, step
from tests.unit.worker.small_models import VOCAB_SIZE, save_model

NUM_TOKENS = 30
PARAMS = {
    0: SamplingParams(),
    1: SamplingParams(temperature=1.0, seed=77, num_logprobs=2),
    2: SamplingParams(temperature=0.8, top_p=0.9, seed=78, repetition_penalty=1.2),
    3: SamplingParams(frequency_penalty=0.6, presence_penalty=0.3, num_prompt_logprobs=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(rounded_llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["native", "torch", "stub"])
def loaded(request: pytest.FixtureRequest, folder: Path) -> tuple[ModelRunner, LoadedModel]:
    runner: ModelRunner
    if request.param == "stub":
        runner = StubRunner(WorkerConfig(runner=RunnerKind.STUB, stub_max_model_len=512))
    else:
        kernels = KernelChoice(request.param)
        if kernels is KernelChoice.NATIVE and load_extension() is None:
            pytest.skip("needs the native kernels: run make install where there is a compiler")
        dtype = WeightsType.BFLOAT16 if kernels is KernelChoice.NATIVE else WeightsType.FLOAT32
        runner = TorchRunner(
            WorkerConfig(model=str(folder), kernels=kernels, dtype=dtype, kv_cache_memory="8MiB", num_threads=2)
        )
    return runner, runner.load(load_request(block_size=16), lambda progress: None)


def prompt_of(slot: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(slot).integers(20, VOCAB_SIZE, 9 + 11 * slot).tolist()
    return tokens


def outputs(
    loaded: tuple[ModelRunner, LoadedModel],
    draft: Callable[[int, Running], list[int]],
    max_tokens_each: int = 1_000,
) -> tuple[dict[int, list[int]], SmallEngine]:
    runner, model = loaded
    runner.reset()
    engine = SmallEngine(runner, model, draft=draft)
    for slot, params in PARAMS.items():
        engine.add(slot, prompt_of(slot), params)
    return engine.run_until(NUM_TOKENS, max_tokens_each), engine


@pytest.mark.parametrize("num_right", [0, 4])
def test_drafts_change_no_token(loaded: tuple[ModelRunner, LoadedModel], num_right: int) -> None:
    expected, _ = outputs(loaded, lambda slot, sequence: [])

    def draft(slot: int, sequence: Running) -> list[int]:
        """Propose some tokens that are right and one that is wrong, other numbers for each sequence."""
        begin = len(sequence.output)
        right = expected[slot][begin : begin + max(0, num_right - slot)]
        return [*right, (expected[slot][begin + len(right)] + 1) % VOCAB_SIZE] if len(right) < num_right else right

    came, engine = outputs(
        loaded, lambda slot, sequence: draft(slot, sequence) if len(sequence.output) < 20 else []
    )

    assert came == expected
    assert (engine.num_accepted_drafts > 0) == (num_right > 0)


def test_a_prompt_in_chunks_may_draft_with_its_last_one(loaded: tuple[ModelRunner, LoadedModel]) -> None:
    expected, _ = outputs(loaded, lambda slot, sequence: [])

    came, engine = outputs(
        loaded, lambda slot, sequence: expected[slot][len(sequence.output) : len(sequence.output) + 3], 7
    )

    assert came == expected
    assert engine.num_accepted_drafts > 2 * NUM_TOKENS


def test_a_draft_behind_the_longest_sequence_is_a_fault(loaded: tuple[ModelRunner, LoadedModel]) -> None:
    runner, model = loaded
    runner.reset()
    prompt = [20] * (model.max_model_len - 1)
    blocks = list(range(-(-model.max_model_len // 16)))

    with pytest.raises(InternalError, match="drafts; the limit is 512"):
        runner.execute(
            step(new=[new_sequence(0, prompt)], scheduled=[(0, len(prompt) + 2, blocks)], drafts={0: [20, 20]})
        )


def test_drafts_before_the_last_known_token_are_a_fault(loaded: tuple[ModelRunner, LoadedModel]) -> None:
    runner, _ = loaded
    runner.reset()

    with pytest.raises(InternalError, match="of them drafts"):
        runner.execute(step(new=[new_sequence(0, [20] * 9)], scheduled=[(0, 5, [0])], drafts={0: [20]}))


def test_a_draft_outside_the_vocabulary_is_a_fault(loaded: tuple[ModelRunner, LoadedModel]) -> None:
    runner, _ = loaded
    runner.reset()

    with pytest.raises(InternalError, match="The drafts reach from"):
        runner.execute(step(new=[new_sequence(0, [20] * 9)], scheduled=[(0, 10, [0])], drafts={0: [10**6]}))
