"""The real model in two ranks: the text of one rank, and the same tokens on both."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from services.worker.config import KernelChoice, Quantization, WorkerConfig
from services.worker.model_runner import TorchRunner
from services.worker.step import SamplingParams
from tests.integration.reference import Reference, references
from tests.unit.worker.kernels.native_models import needs_kernels
from tests.unit.worker.small_engine import SmallEngine, load_request

NUM_TOKENS = 20
# What rounding moves logits by: 8 bits of them, or products of 8 bits with scales of each rank's own.
NEAR_TIE = {Quantization.NONE: 0.35, Quantization.INT8: 1.0}


@contextmanager
def ranks(num_ranks: int, **options: object) -> Iterator[list[SmallEngine]]:
    """Load the model in so many ranks, here as threads of one process, each with an engine that sees the same."""
    group_id = uuid.uuid4().hex if num_ranks > 1 else ""

    def load(rank: int) -> tuple[TorchRunner, SmallEngine]:
        runner = TorchRunner(WorkerConfig(num_threads=1, kv_cache_memory="64MiB", **options))  # type: ignore[arg-type]
        request = load_request(
            block_size=16, rank=rank, tensor_parallel_size=num_ranks, max_num_batched_tokens=512, group_id=group_id
        )
        return runner, SmallEngine(runner, runner.load(request, lambda progress: None))

    with ThreadPoolExecutor(num_ranks) as threads:
        loaded = list(threads.map(load, range(num_ranks)))
    try:
        yield [engine for _, engine in loaded]
    finally:
        for runner, _ in loaded:
            runner.unload()


def outputs_of(engines: list[SmallEngine], prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return the outputs of the prompts, which all ranks must agree on."""

    def run(engine: SmallEngine) -> list[list[int]]:
        for slot, prompt in enumerate(prompts):
            engine.add(slot, prompt, params)
        outputs = list(engine.run_until(NUM_TOKENS, max_tokens_each=40).values())
        for slot in range(len(prompts)):
            engine.end(slot)
        return outputs

    with ThreadPoolExecutor(len(engines)) as threads:
        first, *others = list(threads.map(run, engines))
    assert all(other == first for other in others)
    return first


def conversations(count: int) -> list[Reference]:
    return [reference for reference in references() if len(reference.output_token_ids) > NUM_TOKENS][:count]


@needs_kernels
@pytest.mark.parametrize(
    "quantization", [Quantization.NONE, pytest.param(Quantization.INT8, marks=pytest.mark.slow)]
)
def test_two_ranks_say_what_one_says(quantization: Quantization) -> None:
    prompts = [reference.prompt_token_ids for reference in conversations(6)]
    with ranks(1, quantization=quantization) as [one], ranks(2, quantization=quantization) as two:
        expected = outputs_of([one], prompts, SamplingParams(ignore_eos=True))
        actual = outputs_of(two, prompts, SamplingParams(ignore_eos=True))

        for prompt, ours, alone in zip(prompts, actual, expected, strict=True):
            num_equal = equal_tokens(ours, alone)
            # Where they part, one rank was undecided; what follows is another text.
            if num_equal < NUM_TOKENS:
                assert lead_of_first(one, prompt + alone[:num_equal]) < NEAR_TIE[quantization]


def equal_tokens(ours: list[int], others: list[int]) -> int:
    return next((i for i, pair in enumerate(zip(ours, others, strict=True)) if pair[0] != pair[1]), NUM_TOKENS)


def lead_of_first(engine: SmallEngine, token_ids: list[int]) -> float:
    """Return how much more likely than the second the first next token is, as a difference of logarithms."""
    sequence = engine.add(0, token_ids, SamplingParams(num_logprobs=2))
    while not sequence.output:
        result = engine.run_step(max_tokens_each=400)
    engine.end(0)
    first, second = result.logprobs.tokens.alternative_logprobs.tolist()
    return float(first - second)


@needs_kernels
def test_ranks_draw_the_same_tokens_without_telling_each_other() -> None:
    prompts = [reference.prompt_token_ids for reference in conversations(2)]
    with ranks(2) as two:
        params = SamplingParams(
            temperature=1.0, top_p=0.9, seed=7, ignore_eos=True, num_logprobs=2, num_prompt_logprobs=2
        )
        # All ranks agree, or this fails.
        drawn = outputs_of(two, prompts, params)

    assert drawn[0] != drawn[1]


@pytest.mark.slow
@needs_kernels
def test_drafts_change_no_token_in_two_ranks() -> None:
    prompts = [reference.prompt_token_ids for reference in conversations(3)]
    params = SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.2)
    with ranks(2) as engines:
        expected = outputs_of(engines, prompts, params)
        for engine in engines:
            # Two tokens that are right and one that is wrong, or only right ones.
            engine.draft = lambda slot, sequence: [
                *expected[slot][len(sequence.output) : len(sequence.output) + 2],
                *([9] if slot else []),
            ]
        actual = outputs_of(engines, prompts, params)

        assert actual == expected
        assert min(engine.num_accepted_drafts for engine in engines) > NUM_TOKENS


def test_torch_says_it_in_two_ranks_too() -> None:
    reference = conversations(1)[0]
    with ranks(2, kernels=KernelChoice.TORCH) as two:
        [actual] = outputs_of(two, [reference.prompt_token_ids], SamplingParams(ignore_eos=True))

    num_equal = equal_tokens(actual, reference.output_token_ids[:NUM_TOKENS])
    assert num_equal == NUM_TOKENS or reference.gaps[num_equal] < NEAR_TIE[Quantization.NONE]
