from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from libs.errors import InternalError, ModelLoadFailed
from services.worker.config import RunnerKind, WorkerConfig
from services.worker.step import LoadedModel, SamplingParams
from services.worker.stub_runner import StubRunner, TokenRule
from tests.unit.worker.small_engine import SmallEngine, load_request, new_sequence, step

DRAWN = SamplingParams(temperature=1.0, seed=5)


def make_stub(**config: object) -> tuple[StubRunner, LoadedModel]:
    runner = StubRunner(WorkerConfig(runner=RunnerKind.STUB, **config))  # type: ignore[arg-type]
    return runner, runner.load(load_request(), lambda progress: None)


def output_of(params: SamplingParams, prompt: list[int], count: int) -> list[int]:
    engine = SmallEngine(*make_stub())
    engine.add(0, prompt, params)
    return engine.run_until(count)[0]


def test_it_serves_the_text_side_of_the_model() -> None:
    _, model = make_stub(stub_num_blocks=77, stub_max_model_len=500)

    assert (model.num_blocks, model.max_model_len, model.vocab_size) == (77, 500, 49_152)
    assert len(model.tokenizer_digest) == 32
    assert model.eos_token_ids == (2,)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from services.worker import main, servicer, wire\n"
        "from services.worker.config import RunnerKind, WorkerConfig\n"
        "main._make_runner(WorkerConfig(runner=RunnerKind.STUB))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tokens_follow_the_written_rule() -> None:
    value = 5 * 0x9E3779B97F4A7C15 % 2**64
    for token_id in (40, 41, 42):
        value = (value * 0x100000001B3 + token_id + 1) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    value ^= value >> 31

    assert output_of(DRAWN, [40, 41, 42], 1) == [17 + value % 94]


def test_tokens_depend_on_content_order_and_seed() -> None:
    rule = TokenRule(0, 2**31)

    def token(*ids: int, start: int = 0) -> int:
        return rule.next_token_id(np.array(ids, dtype=np.int32), start)

    tokens = [
        token(1, 2, 3),
        token(3, 2, 1),
        token(1, 2),
        token(1, 2, 4),
        token(0, 1, 2, 3),
        token(1, 2, 3, start=9),
    ]

    assert len(set(tokens)) == len(tokens)


def test_output_is_printable_and_never_ends_by_itself() -> None:
    output = output_of(DRAWN, [30, 31], 300)

    assert min(output) >= 17
    assert max(output) < 17 + 94
    assert len(set(output)) > 60


def test_output_ends_where_it_is_told_to() -> None:
    engine = SmallEngine(*make_stub(stub_eos_after_tokens=3))
    engine.add(0, [30, 31])

    assert engine.run_until(4)[0][3] == 2
    assert 2 not in engine.running[0].output[:3]


def test_output_does_not_depend_on_neighbours_chunks_or_a_pause() -> None:
    prompts = {slot: list(range(20, 25 + 3 * slot)) for slot in range(9)}
    engine = SmallEngine(*make_stub())
    for slot, prompt in prompts.items():
        engine.add(slot, prompt, DRAWN)
    engine.run_until(5, max_tokens_each=3)
    paused = engine.end(4)
    engine.run_step()
    resumed = engine.add(10, prompts[4], DRAWN, output=paused.output)

    engine.run_until(12)

    assert resumed.output[:12] == output_of(DRAWN, prompts[4], 12)
    assert engine.running[8].output[:12] == output_of(DRAWN, prompts[8], 12)


def test_a_prefix_that_holds_the_same_tokens_is_accepted() -> None:
    engine = SmallEngine(*make_stub())
    first = engine.add(0, list(range(20, 32)))
    engine.run_step()

    engine.add(1, [*range(20, 32), 50], shared_blocks=first.block_ids)

    assert len(engine.run_until(3)[1]) == 3


def test_a_block_with_other_tokens_is_found() -> None:
    engine = SmallEngine(*make_stub())
    first = engine.add(0, list(range(20, 32)))
    engine.run_step()

    engine.add(1, [*range(20, 24), 99, *range(25, 32), 50], shared_blocks=first.block_ids)

    with pytest.raises(InternalError, match=f"token 99 at position 4, but block {first.block_ids[1]} holds 24"):
        engine.run_step()


def test_a_block_that_nobody_wrote_is_found() -> None:
    runner, _ = make_stub()

    with pytest.raises(InternalError, match="block 8 holds nothing"):
        runner.execute(
            step(
                new=[new_sequence(0, list(range(20, 26)), num_computed_tokens=4, block_ids=[8])],
                scheduled=[(0, 2, [9])],
            )
        )


def test_blocks_in_the_wrong_order_are_found() -> None:
    engine = SmallEngine(*make_stub())
    first = engine.add(0, list(range(20, 29)))
    engine.run_step()

    engine.add(1, [*range(20, 28), 50], shared_blocks=first.block_ids[1::-1])

    with pytest.raises(InternalError, match="at position 0"):
        engine.run_step()


def test_a_block_given_to_two_running_sequences_is_found() -> None:
    runner, _ = make_stub()
    runner.execute(
        step(
            new=[new_sequence(0, [20, 21]), new_sequence(1, [30, 31, 32])],
            scheduled=[(0, 2, [5]), (1, 3, [6])],
        )
    )
    runner.execute(step(ended=[1], new=[new_sequence(2, [40])], scheduled=[(2, 1, [5])]))

    with pytest.raises(InternalError, match="Slot 0 expects token 20 at position 0, but block 5 holds 40"):
        runner.execute(step(scheduled=[(0, 1, [])]))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias=((5, 1.0),)),
        SamplingParams(allowed_token_ids=(5,)),
        SamplingParams(min_output_tokens=3),
    ],
)
def test_what_needs_logits_is_refused(params: SamplingParams) -> None:
    engine = SmallEngine(*make_stub())
    engine.add(0, [20], params)
    engine.add(1, [20])

    engine.run_step()

    assert engine.running[0].has_failed
    assert len(engine.running[1].output) == 1


def test_a_step_takes_as_long_as_configured() -> None:
    runner, model = make_stub(stub_step_seconds=0.02, stub_seconds_per_token=0.001)
    engine = SmallEngine(runner, model)
    engine.add(0, list(range(20, 40)))
    started = time.perf_counter()

    result = engine.run_step()

    assert result.duration_seconds >= 0.04
    assert time.perf_counter() - started >= result.duration_seconds


def test_more_context_than_configured_is_refused() -> None:
    runner = StubRunner(WorkerConfig(runner=RunnerKind.STUB, stub_max_model_len=64))

    with pytest.raises(ModelLoadFailed, match="64"):
        runner.load(load_request(max_model_len=65), lambda progress: None)


def test_logprobs_follow_the_written_rule_in_any_chunks() -> None:
    params = SamplingParams(num_logprobs=3, num_prompt_logprobs=1)
    rule = TokenRule(17, 94)
    prompt = [30, 31, 110, 40_000, 35]

    def expected(position: int) -> int:
        return rule.next_token_id(np.array(prompt[:position], dtype=np.int32), 0)

    measured = []
    for max_tokens_each in (100, 2):
        engine = SmallEngine(*make_stub())
        engine.add(0, prompt, params)
        results = [engine.run_step(max_tokens_each) for _ in range(-(-len(prompt) // max_tokens_each))]
        measured.append([rank for result in results for rank in result.prompt_logprobs.tokens.ranks.tolist()])

    assert (
        measured[0]
        == measured[1]
        == [
            *(1 + (token_id - expected(position)) % 94 for position, token_id in enumerate(prompt[1:3], 1)),
            95,  # not one of the ids that the stub emits
            1 + (35 - expected(4)) % 94,
        ]
    )
    output = results[-1].logprobs
    assert output.slots.tolist() == [0]
    assert output.tokens.ranks.tolist() == [1]
    assert output.tokens.alternative_logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert output.tokens.alternative_token_ids[0] == results[-1].token_ids[0]
