"""Every architecture in native code: near transformers, and the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.config import Quantization
from tests.unit.worker.kernels.native_models import KERNELS, NativeLlama, Part, needs_kernels, rounded_model
from tests.unit.worker.kernels.test_native_llama import (
    RELATIVE_ERROR,
    Sequences,
    blocks_for,
    random_tokens,
    relative_error,
)
from tests.unit.worker.small_models import FAMILIES, WINDOW, expected_logits

pytestmark = needs_kernels

CHANGES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("gemma3", {"head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1}),
    ("gemma3", {"hidden_size": 45, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 77}),
    ("qwen2", {"head_dim": 64, "num_attention_heads": 14, "num_key_value_heads": 2}),
    ("qwen3", {"head_dim": 96, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": 16}),
    ("mistral", {"sliding_window": 500}),
]


@pytest.mark.parametrize(
    ("family", "changes", "kernels"),
    [
        *((family, changes, "") for family, changes in CHANGES),
        *((family, {}, name) for family in ("llama with biases", "mistral", "gemma3") for name in KERNELS[1:]),
    ],
    ids=str,
)
def test_logits_are_near_transformers_in_fp32(
    tmp_path: Path, family: str, changes: dict[str, Any], kernels: str
) -> None:
    reference = rounded_model(family, **changes)
    native = NativeLlama(reference, tmp_path, kernels=kernels, num_threads=1)
    tokens = random_tokens(70)
    lengths = (1, 2, 15, 16, 17, 33, 70)

    logits = native.last_logits(*(Part(tokens[:n], 0, blocks_for(n, seed)) for seed, n in enumerate(lengths)))

    expected = expected_logits(reference, tokens)[[n - 1 for n in lengths]]
    assert relative_error(logits, expected) < RELATIVE_ERROR


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("window", [WINDOW, 130, 300])
def test_a_window_moves_over_chunks_of_the_softmax(tmp_path: Path, kernels: str, window: int) -> None:
    reference = rounded_model("mistral", sliding_window=window)
    native = NativeLlama(reference, tmp_path, kernels=kernels, num_threads=1)
    tokens, blocks = random_tokens(430), blocks_for(430, 1)
    expected = expected_logits(reference, tokens)

    ends = (100, 101, 255, 256, 257, 290, 400, 415, 416, 429, 430)
    logits = [
        native.last_logits(Part(tokens[:end], start, blocks)) for start, end in zip((0, *ends), ends, strict=False)
    ]

    assert relative_error(torch.cat(logits), expected[[end - 1 for end in ends]]) < RELATIVE_ERROR


def check_random_batches(native: NativeLlama, lengths: list[int], num_batches: int) -> None:
    sequences = Sequences(native, lengths)
    rng = np.random.default_rng(3)
    for _ in range(num_batches):
        chosen, starts, ends = sequences.draw(rng)
        logits = native.last_logits(*map(sequences.part, chosen, starts, ends))

        expected = torch.stack([sequences.logits[i][end - 1] for i, end in zip(chosen, ends, strict=True)])
        assert torch.equal(logits, expected), (chosen, starts, ends)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *(("gemma3", name) for name in KERNELS),
        ("llama with biases", ""),
        ("qwen3 with biases", ""),
        ("mistral", ""),
    ],
)
def test_a_row_does_not_depend_on_its_batch_or_on_chunks(tmp_path: Path, family: str, kernels: str) -> None:
    native = NativeLlama(rounded_model(family), tmp_path, kernels=kernels)

    check_random_batches(native, [1, 17, 100, 290], num_batches=40)


def test_a_row_does_not_depend_on_its_batch_with_int8_weights(tmp_path: Path) -> None:
    native = NativeLlama(rounded_model("gemma3"), tmp_path, quantization=Quantization.INT8)

    check_random_batches(native, [1, 17, 100], num_batches=30)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hundreds_of_batches_give_the_same_bits(
    tmp_path: Path, family: str, kernels: str, num_threads: int
) -> None:
    native = NativeLlama(rounded_model(family), tmp_path, kernels=kernels, num_threads=num_threads)

    check_random_batches(native, [1, 5, 16, 17, 40, 64, 100, 310], num_batches=150)


@pytest.mark.parametrize("kernels", KERNELS)
def test_tiles_before_the_window_are_not_read(tmp_path: Path, kernels: str) -> None:
    native = NativeLlama(rounded_model("mistral", sliding_window=20), tmp_path, kernels=kernels)
    tokens, blocks = random_tokens(301), blocks_for(301, 1)
    native.last_logits(Part(tokens[:300], 0, blocks))
    expected = native.last_logits(Part(tokens, 300, blocks))

    for layer in native.cache.layers:
        layer[blocks[: 281 // 16]] = float("nan")

    assert torch.equal(native.last_logits(Part(tokens, 300, blocks)), expected)
