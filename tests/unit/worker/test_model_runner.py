from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from libs.errors import InternalError, ModelLoadFailed
from services.worker import memory_plan
from services.worker.config import Quantization, WeightsType, WorkerConfig
from services.worker.kv_cache import MemoryState
from services.worker.model_runner import TorchRunner
from services.worker.step import LoadedModel, LoadProgress, SamplingParams, SequenceFailure
from tests.unit.worker.small_engine import SmallEngine, load_request, step
from tests.unit.worker.small_models import END_TOKEN_ID, VOCAB_SIZE, random_llama, save_model

POISON = 13

GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.0, seed=77)
FILTERED = SamplingParams(temperature=0.8, top_p=0.9, seed=78, repetition_penalty=1.2)


def make_runner(folder: Path, **config: object) -> tuple[TorchRunner, LoadedModel]:
    values: dict[str, object] = {"dtype": WeightsType.FLOAT32, "kv_cache_memory": "4MiB", "num_threads": 1}
    runner = TorchRunner(WorkerConfig(model=str(folder), **(values | config)))  # type: ignore[arg-type]
    model = runner.load(load_request(), lambda progress: None)
    runner.wait_until_settled()
    return runner, model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(random_llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[TorchRunner, LoadedModel]:
    return make_runner(folder)


@pytest.fixture
def engine(loaded: tuple[TorchRunner, LoadedModel]) -> SmallEngine:
    runner, model = loaded
    runner.reset()
    return SmallEngine(runner, model)


def prompt_of(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(20, VOCAB_SIZE, count).tolist()
    return tokens


def output_alone(
    loaded: tuple[TorchRunner, LoadedModel], prompt: list[int], params: SamplingParams, count: int
) -> list[int]:
    runner, model = loaded
    runner.reset()
    engine = SmallEngine(runner, model, seed=9)
    engine.add(0, prompt, params)
    output = engine.run_until(count)[0]
    runner.reset()
    return output


def test_loading_tells_what_there_is(folder: Path) -> None:
    runner = TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="1MiB"))
    reports: list[LoadProgress] = []

    model = runner.load(load_request(max_model_len=100), reports.append)

    bytes_per_block = 2 * 4 * 2 * 2 * 8 * 2
    assert model.num_blocks == 2**20 // bytes_per_block - 1
    assert model.kv_cache_bytes == 2**20
    assert (model.max_model_len, model.vocab_size, model.block_size) == (100, VOCAB_SIZE, 4)
    assert model.eos_token_ids == (END_TOKEN_ID,)
    assert len(model.tokenizer_digest) == 32
    # Vectors, which are norms, stay in fp32.
    assert model.weights_bytes == sum(p.numel() * (4 if p.dim() == 1 else 2) for p in random_llama().parameters())
    assert reports[-1].loaded_bytes == reports[-1].total_bytes > 0


def test_more_context_than_the_model_has_is_refused(folder: Path) -> None:
    runner = TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="1MiB"))

    with pytest.raises(ModelLoadFailed, match=r"513.*512"):
        runner.load(load_request(max_model_len=513), lambda progress: None)


def test_a_cache_larger_than_memory_is_refused(folder: Path) -> None:
    runner = TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="900TiB"))

    with pytest.raises(ModelLoadFailed, match="asked to take"):
        runner.load(load_request(), lambda progress: None)


def test_weights_larger_than_memory_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "measure_memory", lambda: MemoryState(10**9, 1_000))
    runner = TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="1MiB"))

    with pytest.raises(ModelLoadFailed, match="only 1000 bytes"):
        runner.load(load_request(), lambda progress: None)


@pytest.mark.parametrize(
    ("quantization", "refusal"),
    # In int8 there is room for them; what is refused then is the cache beside them.
    [(Quantization.NONE, "The weights take"), (Quantization.INT8, "The KV cache was asked to take")],
)
def test_weights_are_measured_in_the_format_in_which_they_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quantization: Quantization, refusal: str
) -> None:
    num_parameters = sum(p.numel() for p in random_llama().parameters())
    monkeypatch.setattr(memory_plan, "measure_memory", lambda: MemoryState(10**9, num_parameters * 3 // 2))
    runner = TorchRunner(WorkerConfig(model=str(folder), kv_cache_memory="1MiB", quantization=quantization))

    with pytest.raises(ModelLoadFailed, match=refusal):
        runner.load(load_request(), lambda progress: None)


def test_a_step_before_loading_is_a_fault(folder: Path) -> None:
    with pytest.raises(InternalError, match="before the model was loaded"):
        TorchRunner(WorkerConfig(model=str(folder))).execute(step())


def test_greedy_output_equals_transformers(engine: SmallEngine) -> None:
    prompt = prompt_of(1, 23)
    reference = random_llama()
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 23:].tolist()

    engine.add(3, prompt)

    assert engine.run_until(30)[3] == expected


@pytest.mark.parametrize("params", [GREEDY, DRAWN, FILTERED])
@pytest.mark.parametrize("max_tokens_each", [1_000, 5, 16])
def test_output_is_the_same_alone_and_among_others_in_any_chunks(
    loaded: tuple[TorchRunner, LoadedModel], engine: SmallEngine, params: SamplingParams, max_tokens_each: int
) -> None:
    prompts = {slot: prompt_of(slot, 3 + 7 * slot) for slot in range(17)}

    for slot, prompt in prompts.items():
        engine.add(slot, prompt, params)
    together = engine.run_until(12, max_tokens_each)

    for slot in (0, 5, 16):
        assert together[slot] == output_alone(loaded, prompts[slot], params, 12)


@pytest.mark.parametrize("params", [GREEDY, DRAWN, FILTERED])
def test_a_resumed_sequence_goes_on_with_the_same_tokens(
    loaded: tuple[TorchRunner, LoadedModel], engine: SmallEngine, params: SamplingParams
) -> None:
    prompt, other = prompt_of(1, 18), prompt_of(2, 30)
    engine.add(0, prompt, params)
    engine.add(1, other, DRAWN)
    engine.run_until(7)
    preempted = engine.end(0)
    engine.run_step()

    resumed = engine.add(4, prompt, params, output=preempted.output)
    engine.run_until(20)

    assert resumed.output[:20] == output_alone(loaded, prompt, params, 20)


def test_a_shared_prefix_gives_the_same_tokens(
    loaded: tuple[TorchRunner, LoadedModel], engine: SmallEngine
) -> None:
    prefix, rest = prompt_of(1, 24), prompt_of(2, 9)
    first = engine.add(0, prefix + prompt_of(3, 5))
    engine.run_step()

    engine.add(1, prefix + rest, DRAWN, shared_blocks=first.block_ids[:6])

    assert engine.run_until(10)[1] == output_alone(loaded, prefix + rest, DRAWN, 10)


def test_a_sequence_is_sampled_only_when_its_last_known_token_is_computed(engine: SmallEngine) -> None:
    engine.add(0, prompt_of(1, 10))

    results = [engine.run_step(max_tokens_each=4) for _ in range(4)]

    assert [len(result.token_ids) for result in results] == [0, 0, 1, 1]
    assert [result.num_computed_tokens for result in results] == [4, 4, 2, 1]


def test_a_step_without_sequences_gives_nothing(engine: SmallEngine) -> None:
    assert engine.run_step().token_ids.tolist() == []


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchRunner, LoadedModel]:
    """A model in which one token's embedding is not a number."""
    model = random_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = float("nan")
    return make_runner(save_model(model, tmp_path_factory.mktemp("poisoned")))


@pytest.mark.parametrize("position", [0, 9, 21])
def test_a_sequence_without_valid_logits_fails_alone(
    loaded: tuple[TorchRunner, LoadedModel], poisoned: tuple[TorchRunner, LoadedModel], position: int
) -> None:
    runner, model = poisoned
    runner.reset()
    engine = SmallEngine(runner, model)
    prompts = {slot: prompt_of(slot, 22) for slot in range(5)}
    for slot, prompt in prompts.items():
        engine.add(slot, [*prompt[:position], POISON, *prompt[position:]] if slot == 2 else prompt, DRAWN)

    outputs = engine.run_until(8)

    assert [slot for slot, sequence in engine.running.items() if sequence.has_failed] == [2]
    assert outputs[2] == []
    for slot in (0, 1, 3, 4):
        assert outputs[slot] == output_alone(loaded, prompts[slot], DRAWN, 8)


def test_a_bad_chunk_fails_before_it_is_sampled(poisoned: tuple[TorchRunner, LoadedModel]) -> None:
    runner, model = poisoned
    runner.reset()
    engine = SmallEngine(runner, model)
    engine.add(0, [20, 21, 22, POISON, 23, 24, 25, 26, 27])

    results = [engine.run_step(max_tokens_each=2) for _ in range(2)]

    assert results[0].failed_sequences == ()
    assert [(f.slot, f.failure) for f in results[1].failed_sequences] == [(0, SequenceFailure.INVALID_LOGITS)]


def test_blocks_of_a_failed_sequence_can_be_used_again(
    loaded: tuple[TorchRunner, LoadedModel], poisoned: tuple[TorchRunner, LoadedModel]
) -> None:
    runner, model = poisoned
    runner.reset()
    engine = SmallEngine(runner, model)
    engine.add(0, [*prompt_of(1, 20), POISON])
    engine.run_step()
    failed = engine.end(0)

    # The newcomer takes the same blocks and does not fill its last one.
    reused = engine.add(0, prompt_of(4, 18), DRAWN)
    engine.run_until(5)

    assert set(reused.block_ids) <= set(failed.block_ids) | set(reused.block_ids[5:])
    assert not reused.has_failed
    assert reused.output[:5] == output_alone(loaded, prompt_of(4, 18), DRAWN, 5)


def test_unfit_parameters_fail_their_sequence_alone(
    loaded: tuple[TorchRunner, LoadedModel], engine: SmallEngine
) -> None:
    engine.add(0, prompt_of(1, 5), SamplingParams(logit_bias=((VOCAB_SIZE, 1.0),)))
    engine.add(1, prompt_of(2, 5), DRAWN)

    outputs = engine.run_until(4)

    assert engine.running[0].has_failed
    assert outputs[1] == output_alone(loaded, prompt_of(2, 5), DRAWN, 4)


def test_loading_again_begins_anew(folder: Path) -> None:
    runner, model = make_runner(folder)
    engine = SmallEngine(runner, model)
    engine.add(0, prompt_of(1, 5))
    engine.run_step()

    model = runner.load(load_request(block_size=8), lambda progress: None)
    engine = SmallEngine(runner, model)
    engine.add(0, prompt_of(1, 5))

    assert model.block_size == 8
    assert len(engine.run_until(3)[0]) == 3
