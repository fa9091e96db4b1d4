"""The runner on native code, and which code it chooses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from libs.errors import ModelLoadFailed
from services.worker import forward_pass
from services.worker.config import KernelChoice, Quantization, WeightsType, WorkerConfig
from services.worker.forward_pass import TorchForwardPass, load_forward_pass
from services.worker.kernels.cpu.forward_pass import NativeForwardPass
from services.worker.model_runner import TorchRunner
from services.worker.step import LoadedModel, SamplingParams
from services.worker.weight_files import open_weights
from services.worker.weights import WeightReader
from tests.unit.worker.kernels.native_models import needs_kernels, rounded_llama
from tests.unit.worker.small_engine import SmallEngine, load_request
from tests.unit.worker.small_models import VOCAB_SIZE, save_model

POISON = 13
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.0, seed=77)
FILTERED = SamplingParams(temperature=0.8, top_p=0.9, seed=78, repetition_penalty=1.2)


def make_runner(folder: Path, quantization: Quantization = Quantization.NONE) -> tuple[TorchRunner, LoadedModel]:
    config = WorkerConfig(
        model=str(folder),
        kernels=KernelChoice.NATIVE,
        quantization=quantization,
        kv_cache_memory="8MiB",
        num_threads=2,
    )
    runner = TorchRunner(config)
    model = runner.load(load_request(block_size=16), lambda progress: None)
    runner.wait_until_settled()
    return runner, model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(rounded_llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=list(Quantization))
def quantization(request: pytest.FixtureRequest) -> Quantization:
    return Quantization(request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path, quantization: Quantization) -> tuple[TorchRunner, LoadedModel]:
    return make_runner(folder, quantization)


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


@needs_kernels
@pytest.mark.parametrize("params", [GREEDY, DRAWN, FILTERED])
@pytest.mark.parametrize("max_tokens_each", [1_000, 5, 16])
def test_output_is_the_same_alone_and_among_others_in_any_chunks(
    loaded: tuple[TorchRunner, LoadedModel], params: SamplingParams, max_tokens_each: int
) -> None:
    runner, model = loaded
    runner.reset()
    engine = SmallEngine(runner, model)
    prompts = {slot: prompt_of(slot, 3 + 7 * slot) for slot in range(17)}

    for slot, prompt in prompts.items():
        engine.add(slot, prompt, params)
    together = engine.run_until(12, max_tokens_each)

    for slot in (0, 5, 16):
        assert together[slot] == output_alone(loaded, prompts[slot], params, 12)


@needs_kernels
def test_a_sequence_without_valid_logits_fails_alone_and_its_blocks_can_be_used_again(
    loaded: tuple[TorchRunner, LoadedModel], tmp_path: Path, quantization: Quantization
) -> None:
    poisoned = rounded_llama()
    with torch.no_grad():
        poisoned.model.embed_tokens.weight[POISON] = float("nan")
    runner, model = make_runner(save_model(poisoned, tmp_path), quantization)
    engine = SmallEngine(runner, model)
    engine.add(0, [*prompt_of(1, 20), POISON])
    engine.add(1, prompt_of(2, 20), DRAWN)
    engine.run_step()
    failed = engine.end(0)

    reused = engine.add(0, prompt_of(4, 18), DRAWN)
    outputs = engine.run_until(6)

    assert failed.has_failed
    assert set(reused.block_ids) <= set(failed.block_ids)
    assert outputs[0] == output_alone(loaded, prompt_of(4, 18), DRAWN, 6)
    assert outputs[1] == output_alone(loaded, prompt_of(2, 20), DRAWN, 6)


@needs_kernels
def test_loading_again_begins_anew(folder: Path) -> None:
    runner, _ = make_runner(folder)
    model = runner.load(load_request(block_size=32), lambda progress: None)
    runner.wait_until_settled()
    engine = SmallEngine(runner, model)
    engine.add(0, prompt_of(1, 40))

    assert len(engine.run_until(3)[0]) == 3


@needs_kernels
def test_a_load_leaves_the_cache_empty_and_measures_the_machine(folder: Path) -> None:
    runner, model = make_runner(folder)

    assert runner._loaded is not None
    assert not any(layer.any() for layer in runner._loaded.cache.layers)
    assert model.limits is not None
    assert model.limits.bytes_per_second > 0
    assert model.limits.operations_per_second > 0


@needs_kernels
def test_a_step_tells_what_it_had_to_do(folder: Path) -> None:
    runner, model = make_runner(folder)
    engine = SmallEngine(runner, model)
    engine.add(0, prompt_of(1, 40))

    prefill, decode = engine.run_step().work, engine.run_step().work

    assert prefill is not None
    assert decode is not None
    assert (prefill.kind.value, decode.kind.value) == ("prefill", "decode")
    # Panels are padded to whole vectors, so they are not smaller than the weights.
    assert prefill.weight_bytes == decode.weight_bytes >= model.weights_bytes * 0.9
    assert decode.kv_bytes * 40 == prefill.kv_bytes * 41
    assert prefill.num_operations > 39 * decode.num_operations * 0.3


@needs_kernels
def test_what_is_loaded_is_stated_before_and_compared_after(folder: Path) -> None:
    with capture_logs() as events:
        _, model = make_runner(folder)

    (before,) = [event for event in events if event["event"] == "memory expected"]
    (after,) = [event for event in events if event["event"].startswith("memory in use")]
    assert before["kv_cache_bytes"] == model.kv_cache_bytes
    assert before["expected_resident_bytes"] == after["expected_resident_bytes"]
    assert after["resident_bytes"] > model.kv_cache_bytes


@needs_kernels
def test_the_first_step_is_as_good_as_any(folder: Path) -> None:
    outputs = []
    for _ in range(2):
        runner, model = make_runner(folder)
        engine = SmallEngine(runner, model)
        engine.add(0, prompt_of(1, 20), DRAWN)
        outputs.append(engine.run_until(6)[0])
        engine.end(0)
        engine.add(0, prompt_of(1, 20), DRAWN)
        outputs.append(engine.run_until(6)[0])

    assert all(output == outputs[0] for output in outputs)


@needs_kernels
def test_weights_in_int8_take_a_byte_and_a_scale_for_each_column(tmp_path: Path) -> None:
    # Whole panels of 32 columns and blocks of 64 inputs, so that there is no padding.
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = save_model(rounded_llama(**sizes, vocab_size=96), tmp_path)
    num_columns = 96 + 2 * (3 * 128 + 128 + 2 * 192 + 128) + 96
    num_weights = 2 * 96 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 192)
    vectors = 4 * (5 * 128 + 16 + 1)  # norms, frequencies of the rotary positions and their amplitude

    models = {quantization: make_runner(folder, quantization)[1] for quantization in Quantization}

    assert models[Quantization.NONE].weights_bytes == 2 * num_weights + vectors
    assert models[Quantization.INT8].weights_bytes == num_weights + 4 * num_columns + vectors


@pytest.mark.parametrize("reason", ["blocks of 4", "not built"])
def test_int8_is_refused_where_native_code_cannot_serve(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "not built":
        monkeypatch.setattr(forward_pass, "load_extension", lambda: None)
    runner = TorchRunner(WorkerConfig(model=str(folder), quantization=Quantization.INT8))

    with pytest.raises(ModelLoadFailed, match=f"int8 need the native kernels, but .*{reason}"):
        runner.load(load_request(block_size=4 if reason == "blocks of 4" else 16), lambda progress: None)


def choose(
    folder: Path, choice: KernelChoice, dtype: torch.dtype = torch.bfloat16, block_size: int = 16
) -> forward_pass.ForwardPass:
    source = open_weights(folder)
    reader = WeightReader(source, dtype, lambda done, total: None)
    return load_forward_pass(choice, source.config, reader, dtype=dtype, block_size=block_size, num_threads=1)


@needs_kernels
def test_auto_takes_native_code_for_bfloat16(folder: Path) -> None:
    assert isinstance(choose(folder, KernelChoice.AUTO), NativeForwardPass)


def test_torch_is_taken_when_it_is_asked_for(folder: Path) -> None:
    with capture_logs() as events:
        assert isinstance(choose(folder, KernelChoice.TORCH), TorchForwardPass)

    assert events == []


@pytest.mark.parametrize(
    ("dtype", "block_size", "reason"), [(torch.float32, 16, "bfloat16 only"), (torch.bfloat16, 4, "blocks of 4")]
)
def test_auto_falls_back_to_torch_with_one_warning(
    folder: Path, dtype: torch.dtype, block_size: int, reason: str
) -> None:
    with capture_logs() as events:
        chosen = choose(folder, KernelChoice.AUTO, dtype, block_size)

    assert isinstance(chosen, TorchForwardPass)
    assert [reason in event["reason"] for event in events if event["log_level"] == "warning"] == [True]


def test_without_the_extension_torch_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "load_extension", lambda: None)

    with capture_logs() as events:
        chosen = choose(folder, KernelChoice.AUTO)

    assert isinstance(chosen, TorchForwardPass)
    assert "services.worker.kernels.cpu.build" in events[0]["reason"]


def test_native_code_that_cannot_serve_is_refused(folder: Path) -> None:
    runner = TorchRunner(WorkerConfig(model=str(folder), kernels=KernelChoice.NATIVE, dtype=WeightsType.FLOAT32))

    with pytest.raises(ModelLoadFailed, match="bfloat16 only"):
        runner.load(load_request(block_size=16), lambda progress: None)
