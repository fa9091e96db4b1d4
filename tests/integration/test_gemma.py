"""Gemma 3 270M on the weights that are served: near transformers in fp32, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from libs.text import resolve_model_path
from services.worker.config import WorkerConfig
from services.worker.forward_pass import ForwardPass, TorchForwardPass
from services.worker.kernels.cpu.forward_pass import NativeForwardPass
from services.worker.kv_cache import KVCachePlan
from services.worker.layers.threads import OperatorThreads
from services.worker.model_runner import TorchRunner
from services.worker.weight_files import open_weights
from services.worker.weights import WeightReader, WeightSource
from tests.gemma import LENGTHS, LOGITS_STRIDE, gemma_record, needs_gemma
from tests.unit.worker.gguf_blocks import LAYOUTS, GgufType
from tests.unit.worker.kernels.native_models import EXTENSION, Part, flat_batch, needs_kernels
from tests.unit.worker.small_engine import SmallEngine, load_request

pytestmark = needs_gemma

BLOCK_SIZE = 16
NUM_BLOCKS = 128
NUM_THREADS = 2
BLOCKS = list(range(7, 7 + -(-LENGTHS[-1] // BLOCK_SIZE)))


@pytest.fixture(scope="module")
def source() -> WeightSource:
    return open_weights(resolve_model_path("gemma3-270m"))


def with_cache(forward_pass: ForwardPass, source: WeightSource, dtype: torch.dtype) -> ForwardPass:
    config = source.config
    size = config.num_layers * BLOCK_SIZE * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    forward_pass.make_cache(KVCachePlan(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, bytes_per_block=size))
    return forward_pass


def reader(source: WeightSource, dtype: torch.dtype) -> WeightReader:
    return WeightReader(source, dtype, lambda done, total: None)


@pytest.fixture(scope="module")
def native(source: WeightSource) -> ForwardPass:
    assert EXTENSION is not None
    loaded = NativeForwardPass(
        EXTENSION,
        source.config,
        reader(source, torch.bfloat16),
        block_size=BLOCK_SIZE,
        num_threads=NUM_THREADS,
    )
    return with_cache(loaded, source, torch.bfloat16)


@torch.inference_mode()
def logits_of(forward_pass: ForwardPass, *parts: Part) -> torch.Tensor:
    batch = flat_batch(parts)
    return torch.from_numpy(forward_pass.run(batch).logits(batch.is_sampled)).clone()


def errors_against_transformers(forward_pass: ForwardPass, lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    """Compute the prompt in chunks that end at the recorded positions; return each one's relative error."""
    record, starts = gemma_record(), (0, *lengths)
    logits = torch.cat(
        [
            logits_of(forward_pass, Part(record.prompt_token_ids[:end], start, BLOCKS))
            for start, end in zip(starts, lengths, strict=False)
        ]
    )
    expected = torch.tensor(record.logits)[: len(lengths)]
    assert logits.argmax(-1).tolist() == [largest[0] for largest in record.largest[: len(lengths)]]
    errors: torch.Tensor = (logits[:, ::LOGITS_STRIDE] - expected).norm(dim=-1) / expected.norm(dim=-1)
    return errors


def test_logits_in_fp32_equal_transformers(source: WeightSource) -> None:
    threads = OperatorThreads(NUM_THREADS)
    torch_pass = TorchForwardPass(source.config, reader(source, torch.float32), torch.float32, threads)

    # A few positions, for time; windows are tried by native code below, and by both in make test-slow.
    errors = errors_against_transformers(with_cache(torch_pass, source, torch.float32), LENGTHS[:3])

    # The record is rounded to four digits.
    assert errors.max() < 1e-3


@needs_kernels
def test_native_logits_are_near_transformers(native: ForwardPass) -> None:
    assert errors_against_transformers(native).max() < 0.025


@needs_kernels
def test_logits_are_the_same_bits_alone_together_and_in_chunks(native: ForwardPass) -> None:
    tokens, blocks = gemma_record().prompt_token_ids, BLOCKS
    other = Part(tokens[100:140], 0, [0, 1, 2])
    alone = torch.cat([logits_of(native, Part(tokens[:700], 0, blocks)), logits_of(native, other)])

    for start, end in ((0, 500), (500, 501), (501, 699), (699, 700)):
        chunked = logits_of(native, Part(tokens[:end], start, blocks), other)

    assert torch.equal(chunked, alone)


@needs_kernels
@pytest.mark.slow
def test_greedy_output_is_that_of_transformers_up_to_near_ties() -> None:
    record = gemma_record()
    runner = TorchRunner(WorkerConfig(model="gemma3-270m", kv_cache_memory="64MiB", num_threads=NUM_THREADS))
    model = runner.load(load_request(block_size=BLOCK_SIZE), lambda progress: None)
    engine = SmallEngine(runner, model)
    engine.add(0, record.question_token_ids)

    output = engine.run_until(len(record.answer_token_ids))[0]

    assert model.vocab_size == 262_144
    assert output[:8] == record.answer_token_ids[:8]


@pytest.mark.slow
def test_every_format_in_the_file_means_what_its_layout_says(source: WeightSource) -> None:
    tensors = {
        tensor.tensor_type: tensor
        for tensor in gguf.GGUFReader(resolve_model_path("gemma3-270m")).tensors
        if tensor.tensor_type in LAYOUTS and tensor.name != "token_embd.weight"
    }
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    names |= {"ffn_down": "mlp.down_proj"}

    for kind, tensor in tensors.items():
        _, layer, name, _ = tensor.name.split(".")
        values = source.read(f"model.layers.{layer}.{names[name]}.weight")
        expected = torch.tensor(LAYOUTS[kind].read_all(bytes(tensor.data[:8].reshape(-1))))
        torch.testing.assert_close(values[:8].reshape(-1), expected, rtol=1e-5, atol=1e-7)

    assert set(tensors) == {GgufType.Q5_0, GgufType.Q4_K, GgufType.Q6_K, GgufType.Q8_0}


@pytest.mark.slow
def test_logits_of_every_position_equal_transformers(source: WeightSource) -> None:
    path = resolve_model_path("gemma3-270m")
    reference = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    tokens = gemma_record().prompt_token_ids
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    del reference
    threads = OperatorThreads(NUM_THREADS)
    torch_pass = with_cache(
        TorchForwardPass(source.config, reader(source, torch.float32), torch.float32, threads),
        source,
        torch.float32,
    )

    for end in range(1, len(tokens) + 1, 3):
        logits = logits_of(torch_pass, Part(tokens[:end], max(0, end - 3), BLOCKS))[0]

        assert (logits - expected[end - 1]).norm() / expected[end - 1].norm() < 1e-4
