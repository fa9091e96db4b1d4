"""The runner against transformers on the real model: same weights, same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from libs.text import resolve_model_path
from services.worker.config import WeightsType, WorkerConfig
from services.worker.kv_cache import KVCache, KVCachePlan
from services.worker.layers.attention import StepLayout
from services.worker.layers.threads import OperatorThreads
from services.worker.model_runner import TorchRunner
from services.worker.models.decoder import Decoder, ForwardBatch
from services.worker.step import LoadedModel, SamplingParams
from services.worker.weight_files import open_weights
from services.worker.weights import WeightReader
from tests.unit.worker.small_engine import SmallEngine, load_request

MODEL = "smollm2-135m-instruct"
BLOCK_SIZE = 16
# One thread is slower on an idle machine and much faster on a busy one.
NUM_THREADS = 1
# "<|im_start|>user\nName three primes.<|im_end|>\n<|im_start|>assistant\n" and a text without meaning.
CHAT = [1, 4093, 198, 10203, 1296, 38164, 30, 2, 198, 1, 520, 9531, 198]


def random_tokens(count: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(20, 49_000, count).tolist()
    return tokens


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    torch.set_num_threads(NUM_THREADS)
    path = resolve_model_path(MODEL)
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def fp32() -> tuple[TorchRunner, LoadedModel]:
    runner = TorchRunner(WorkerConfig(dtype=WeightsType.FLOAT32, kv_cache_memory="256MiB", num_threads=NUM_THREADS))
    return runner, runner.load(load_request(block_size=BLOCK_SIZE), lambda progress: None)


@pytest.mark.parametrize("chunks", [[300], [64] * 4 + [44], [1, 15, 16, 17, 251]])
def test_logits_of_every_position_equal_transformers(reference: torch.nn.Module, chunks: list[int]) -> None:
    source = open_weights(resolve_model_path(MODEL))
    reader = WeightReader(source, torch.float32, lambda done, total: None)
    model = Decoder(source.config, reader, torch.float32, OperatorThreads(NUM_THREADS))
    bytes_per_block = 30 * BLOCK_SIZE * 2 * 3 * 64 * 4
    plan = KVCachePlan(num_blocks=20, block_size=BLOCK_SIZE, bytes_per_block=bytes_per_block)
    cache = KVCache(source.config, plan, torch.float32)
    blocks = np.random.default_rng(1).permutation(20)[None, :19].astype(np.int32)
    tokens = [*CHAT, *random_tokens(300 - len(CHAT), 2)]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]

        parts, start = [], 0
        for count in chunks:
            positions = np.arange(start, start + count)
            layout = StepLayout(np.array([0]), np.array([count]), np.array([start + count]), blocks, BLOCK_SIZE)
            slots = blocks[0, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            batch = ForwardBatch(
                torch.tensor(tokens[start : start + count]),
                torch.from_numpy(positions),
                torch.from_numpy(slots),
                layout,
            )
            parts.append(model.logits(model.forward(batch, cache)))
            start += count

    difference = (torch.cat(parts) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert difference.max() < 1e-3


def test_greedy_output_equals_transformers(
    reference: torch.nn.Module, fp32: tuple[TorchRunner, LoadedModel]
) -> None:
    prompts = [CHAT, random_tokens(90, 3), random_tokens(33, 4)]
    engine = SmallEngine(*fp32)
    for slot, prompt in enumerate(prompts):
        engine.add(slot, prompt)

    outputs = engine.run_until(16)
    fp32[0].reset()

    for slot, prompt in enumerate(prompts):
        expected = reference.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert outputs[slot] == expected[0, len(prompt) :].tolist()


def test_seeded_output_is_the_same_alone_among_others_and_resumed(fp32: tuple[TorchRunner, LoadedModel]) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
    alone = SmallEngine(*fp32)
    alone.add(0, CHAT, params)
    expected = alone.run_until(24)[0]
    fp32[0].reset()

    engine = SmallEngine(*fp32, seed=5)
    for slot in range(16):
        engine.add(slot, random_tokens(10 + 9 * slot, slot), SamplingParams(temperature=1.0, seed=slot))
    engine.add(16, CHAT, params)
    engine.run_until(9, max_tokens_each=32)
    preempted = engine.end(16)
    engine.run_step()
    resumed = engine.add(20, CHAT, params, output=preempted.output)
    engine.run_until(24)
    fp32[0].reset()

    assert resumed.output[:24] == expected


def test_bfloat16_differs_only_where_two_tokens_are_near_each_other(reference: torch.nn.Module) -> None:
    runner = TorchRunner(WorkerConfig(kv_cache_memory="128MiB", num_threads=NUM_THREADS))
    engine = SmallEngine(runner, runner.load(load_request(block_size=BLOCK_SIZE), lambda progress: None))
    prompts = [CHAT, random_tokens(60, 5), random_tokens(200, 6)]
    for slot, prompt in enumerate(prompts):
        engine.add(slot, prompt)

    outputs = engine.run_until(24)

    for slot, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + outputs[slot]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(outputs[slot])[:, None])[:, 0]
        # Given the same tokens before, what bf16 chose is in fp32 at most a rounding error of its logits behind.
        assert (logits.max(-1).values - chosen).max() < 0.35
