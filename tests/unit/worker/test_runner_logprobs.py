"""Log-probabilities and grammars in the runner: a real forward pass, chunks, shared blocks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libs.logprobs import TokenLogprobs
from libs.text import ModelText
from services.worker.config import Quantization, WeightsType, WorkerConfig
from services.worker.model_runner import TorchRunner
from services.worker.prompt_logprobs import MAX_ROWS_AT_A_TIME
from services.worker.step import LoadedModel, NewSequence, SamplingParams, SequenceFailure, StepResult
from services.worker.token_mask import TokenMask, TokenMatcher, mask_of
from tests.unit.worker.kernels.native_models import EXTENSION, rounded_llama
from tests.unit.worker.small_engine import SmallEngine, load_request
from tests.unit.worker.small_models import VOCAB_SIZE, expected_logits, random_llama, save_model

SCORED = SamplingParams(num_prompt_logprobs=2, num_logprobs=2)
BLOCK_SIZE = 16


@pytest.fixture(scope="module", params=["torch in fp32", "native in bf16", "native in int8"])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TorchRunner, LoadedModel]:
    is_torch = request.param == "torch in fp32"
    folder = save_model(random_llama() if is_torch else rounded_llama(), tmp_path_factory.mktemp("model"))
    dtype = WeightsType.FLOAT32 if is_torch else WeightsType.BFLOAT16
    quantization = Quantization.INT8 if request.param == "native in int8" else Quantization.NONE
    if quantization is Quantization.INT8 and EXTENSION is None:
        pytest.skip("needs the compiled kernels: python -m services.worker.kernels.cpu.build")
    runner = TorchRunner(
        WorkerConfig(
            model=str(folder), dtype=dtype, quantization=quantization, kv_cache_memory="8MiB", num_threads=2
        )
    )
    return runner, runner.load(load_request(block_size=BLOCK_SIZE), lambda progress: None)


def engine_of(loaded: tuple[TorchRunner, LoadedModel]) -> SmallEngine:
    runner, model = loaded
    runner.reset()
    return SmallEngine(runner, model)


def prompt_of(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(20, VOCAB_SIZE, count).tolist()
    return tokens


def of_slot(results: list[StepResult], slot: int) -> tuple[list[int], TokenLogprobs]:
    """Return the positions that were measured of a slot's prompt, and their entries."""
    positions: list[int] = []
    parts: list[TokenLogprobs] = []
    for result in results:
        prompts = result.prompt_logprobs
        owners = np.repeat(prompts.slots, prompts.num_tokens)
        parts.append(prompts.tokens.take(owners == slot))
        for each, position, count in zip(
            prompts.slots.tolist(), prompts.positions.tolist(), prompts.num_tokens.tolist(), strict=True
        ):
            if each == slot:
                positions += range(position, position + count)
    return positions, TokenLogprobs.joined(parts)


@pytest.mark.parametrize("max_tokens_each", [1_000, 7, 1])
def test_prompt_logprobs_are_the_same_in_any_chunks_and_near_the_softmax(
    loaded: tuple[TorchRunner, LoadedModel], max_tokens_each: int
) -> None:
    prompt = prompt_of(3, MAX_ROWS_AT_A_TIME + 15)
    whole, chunked = engine_of(loaded), engine_of(loaded)
    whole.add(0, prompt, SCORED)
    positions, expected = of_slot([whole.run_step()], 0)

    chunked = engine_of(loaded)
    chunked.add(0, prompt, SCORED)
    chunked.add(1, prompt_of(4, 90))
    results = [chunked.run_step(max_tokens_each) for _ in range(-(-len(prompt) // max_tokens_each) + 1)]

    assert positions == list(range(1, len(prompt)))
    chunked_positions, measured = of_slot(results, 0)
    assert chunked_positions == positions
    assert measured.logprobs.tolist() == expected.logprobs.tolist()
    assert measured.alternative_token_ids.tolist() == expected.alternative_token_ids.tolist()
    assert of_slot(results, 1)[0] == []
    is_fp32 = loaded[0]._config.dtype is WeightsType.FLOAT32
    reference = torch.log_softmax(expected_logits(random_llama() if is_fp32 else rounded_llama(), prompt), -1)
    np.testing.assert_allclose(
        measured.logprobs, reference[range(len(prompt) - 1), prompt[1:]], atol=1e-4 if is_fp32 else 0.4
    )


def test_output_logprobs_come_with_the_tokens_of_those_who_asked(loaded: tuple[TorchRunner, LoadedModel]) -> None:
    engine = engine_of(loaded)
    for slot, params in enumerate((SamplingParams(), SCORED, SamplingParams(num_logprobs=0))):
        engine.add(slot, prompt_of(slot, 12), params)

    result = engine.run_step()

    assert result.slots.tolist() == [0, 1, 2]
    assert result.logprobs.slots.tolist() == [1, 2]
    assert result.logprobs.tokens.num_alternatives.tolist() == [2, 0]
    # Greedy takes the likeliest.
    assert result.logprobs.tokens.ranks.tolist() == [1, 1]
    assert result.logprobs.tokens.alternative_token_ids[0] == result.token_ids[1]
    assert result.logprobs.tokens.alternative_logprobs[0] == result.logprobs.tokens.logprobs[0]


def test_a_prompt_that_begins_in_shared_blocks_is_measured_from_there(
    loaded: tuple[TorchRunner, LoadedModel],
) -> None:
    prompt = prompt_of(5, 40)
    engine = engine_of(loaded)
    first = engine.add(0, prompt, SCORED)
    _, expected = of_slot([engine.run_step()], 0)

    engine.add(1, prompt, SCORED, shared_blocks=first.block_ids[:2])
    positions, measured = of_slot([engine.run_step()], 1)

    # The engine decides what is read from blocks; a token's entry needs the row before it.
    assert positions == list(range(33, 40))
    assert measured.logprobs.tolist() == expected.logprobs[32:].tolist()


def test_a_prompt_that_gives_no_numbers_fails_alone(tmp_path: Path) -> None:
    model = random_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = float("nan")
    runner = TorchRunner(
        WorkerConfig(model=str(save_model(model, tmp_path)), dtype=WeightsType.FLOAT32, kv_cache_memory="4MiB")
    )
    engine = SmallEngine(runner, runner.load(load_request(), lambda progress: None))
    engine.add(0, [*prompt_of(1, 9), 13, *prompt_of(2, 9)], SCORED)
    engine.add(1, prompt_of(3, 12), SCORED)

    result = engine.run_step()

    assert [(f.slot, f.failure) for f in result.failed_sequences] == [(0, SequenceFailure.INVALID_LOGITS)]
    assert of_slot([result], 0)[0] == []
    assert of_slot([result], 1)[0] == list(range(1, 12))


class CountsDown:
    """Allows one token after the other, as many as it was given, and then none."""

    is_prepared = True
    failure: str | None = None

    def prepare(self, timeout_seconds: float) -> bool:
        return True

    def __init__(self, token_ids: list[int], accepted: list[int]) -> None:
        self._left = token_ids[len(accepted) :]

    def fill_mask(self, mask: TokenMask) -> None:
        mask[:] = mask_of(self._left[:1], VOCAB_SIZE)

    def accept(self, token_id: int) -> None:
        assert token_id == self._left.pop(0)


class CountdownMatchers:
    def __init__(self, text: ModelText) -> None:
        pass

    def matcher_of(self, sequence: NewSequence) -> TokenMatcher | None:
        output = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
        return CountsDown([40, 41, 42, 43], output) if sequence.slot in (1, 3) else None

    def close(self) -> None:
        pass


class LateMatcher(CountsDown):
    is_prepared = False

    def prepare(self, timeout_seconds: float) -> bool:
        return False


class LateMatchers(CountdownMatchers):
    def matcher_of(self, sequence: NewSequence) -> TokenMatcher | None:
        return LateMatcher([], []) if sequence.slot == 1 else None


def test_a_sequence_whose_grammar_is_late_is_not_blamed(tmp_path: Path) -> None:
    folder = save_model(random_llama(), tmp_path)
    runner = TorchRunner(
        WorkerConfig(model=str(folder), dtype=WeightsType.FLOAT32, kv_cache_memory="4MiB"), LateMatchers
    )
    engine = SmallEngine(runner, runner.load(load_request(), lambda progress: None))
    engine.add(0, prompt_of(1, 9))
    engine.add(1, prompt_of(1, 9))

    [failed] = engine.run_step().failed_sequences

    assert (failed.slot, failed.failure) == (1, SequenceFailure.NOT_READY)
    assert len(engine.running[0].output) == 1


class FailingMatcher(CountsDown):
    failure = "The grammar cannot be followed further."


class FailingMatchers(CountdownMatchers):
    def matcher_of(self, sequence: NewSequence) -> TokenMatcher | None:
        return FailingMatcher([], []) if sequence.slot == 1 else None


def test_a_sequence_whose_grammar_fails_is_told_why(tmp_path: Path) -> None:
    folder = save_model(random_llama(), tmp_path)
    runner = TorchRunner(
        WorkerConfig(model=str(folder), dtype=WeightsType.FLOAT32, kv_cache_memory="4MiB"), FailingMatchers
    )
    engine = SmallEngine(runner, runner.load(load_request(), lambda progress: None))
    engine.add(0, prompt_of(1, 9))
    engine.add(1, prompt_of(1, 9))

    [failed] = engine.run_step().failed_sequences

    assert (failed.slot, failed.failure) == (1, SequenceFailure.NO_TOKEN_LEFT)
    assert failed.message == "The grammar cannot be followed further."


def test_a_matcher_leads_its_sequence_until_nothing_is_allowed(tmp_path: Path) -> None:
    folder = save_model(random_llama(), tmp_path)
    runner = TorchRunner(
        WorkerConfig(model=str(folder), dtype=WeightsType.FLOAT32, kv_cache_memory="4MiB"), CountdownMatchers
    )
    engine = SmallEngine(runner, runner.load(load_request(), lambda progress: None))
    engine.add(0, prompt_of(1, 9))
    engine.add(1, prompt_of(1, 9), SamplingParams(temperature=1.0, seed=3))
    # One that comes back after two tokens: its matcher has accepted them.
    engine.add(3, prompt_of(1, 9), output=[40, 41])

    results = [engine.run_step() for _ in range(6)]

    assert engine.running[1].output == engine.running[3].output == [40, 41, 42, 43]
    assert len(engine.running[0].output) == 6
    failed = [f for result in results for f in result.failed_sequences]
    assert [(f.slot, f.failure) for f in failed] == [
        (3, SequenceFailure.NO_TOKEN_LEFT),
        (1, SequenceFailure.NO_TOKEN_LEFT),
    ]
    assert "No token may come next" in failed[0].message
