"""Native code against transformers, and its results whatever else is in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.config import Quantization
from tests.unit.worker.kernels.native_models import (
    BLOCK_SIZE,
    EXTENSION,
    KERNELS,
    NativeLlama,
    Part,
    flat_batch,
    needs_kernels,
    rounded_llama,
)
from tests.unit.worker.small_models import VOCAB_SIZE, expected_logits
from tests.unit.worker.test_decoder import LLAMA3_ROPE

pytestmark = needs_kernels

# Activations are rounded to 8 bits some ten times in two layers, and errors of single logits average out.
RELATIVE_ERROR = 0.03
# Weights are rounded as well, both to 127 steps of the largest value of 64 to 130; seen: up to 0.060.
INT8_RELATIVE_ERROR = 0.08

QUANTIZATIONS = list(Quantization)

SHAPES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 6},
    {"num_key_value_heads": 1},
    {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
    {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 96},
    {"hidden_size": 45, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 77},
    {"hidden_size": 130, "num_attention_heads": 10, "intermediate_size": 33, "num_hidden_layers": 1},
    {"tie_word_embeddings": True, "vocab_size": 64},
    {"tie_word_embeddings": True, "vocab_size": 131},
    {"rope_parameters": LLAMA3_ROPE, "head_dim": 64},
    {"num_hidden_layers": 3, "rms_norm_eps": 1e-3},
]


def random_tokens(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, 60, count).tolist()
    return tokens


def blocks_for(count: int, seed: int) -> list[int]:
    """Return blocks in random order from a range of the seed's own."""
    blocks: list[int] = (
        np.random.default_rng(seed).permutation(32)[: -(-count // BLOCK_SIZE)] + 32 * seed
    ).tolist()
    return blocks


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_logits_are_near_transformers_in_fp32(tmp_path: Path, changes: dict[str, Any], kernels: str) -> None:
    reference = rounded_llama(**changes)
    native = NativeLlama(reference, tmp_path, kernels=kernels)
    tokens = random_tokens(70)
    lengths = (1, 2, 15, 16, 17, 33, 70)

    logits = native.last_logits(*(Part(tokens[:n], 0, blocks_for(n, seed)) for seed, n in enumerate(lengths)))

    expected = expected_logits(reference, tokens)[[n - 1 for n in lengths]]
    assert relative_error(logits, expected) < RELATIVE_ERROR


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_logits_in_int8_are_near_transformers_in_fp32(
    tmp_path: Path, changes: dict[str, Any], kernels: str
) -> None:
    reference = rounded_llama(**changes)
    native = NativeLlama(reference, tmp_path, kernels=kernels, quantization=Quantization.INT8)
    tokens = random_tokens(70)
    lengths = (1, 2, 15, 16, 17, 33, 70)

    logits = native.last_logits(*(Part(tokens[:n], 0, blocks_for(n, seed)) for seed, n in enumerate(lengths)))

    expected = expected_logits(reference, tokens)[[n - 1 for n in lengths]]
    assert relative_error(logits, expected) < INT8_RELATIVE_ERROR


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_context_at_the_models_limit(tmp_path: Path, kernels: str) -> None:
    reference = rounded_llama()
    native = NativeLlama(reference, tmp_path, kernels=kernels)
    tokens = random_tokens(512)
    blocks = blocks_for(512, 1)

    native.last_logits(Part(tokens[:511], 0, blocks))
    logits = native.last_logits(Part(tokens, 511, blocks))

    assert relative_error(logits, expected_logits(reference, tokens)[-1:]) < RELATIVE_ERROR


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_the_block_size_does_not_change_logits(tmp_path: Path, block_size: int) -> None:
    tokens = random_tokens(100)
    wide = NativeLlama(rounded_llama(), tmp_path / "wide", block_size=block_size)
    narrow = NativeLlama(rounded_llama(), tmp_path / "narrow")

    logits = wide.last_logits(Part(tokens, 0, [9, 4, 7, 2, 1, 5, 3][: -(-100 // block_size)]))

    assert torch.equal(logits, narrow.last_logits(Part(tokens, 0, blocks_for(100, 2))))


class Sequences:
    """Sequences that have been computed alone, token by token, and their logits at each position."""

    def __init__(self, native: NativeLlama, lengths: list[int]) -> None:
        self.native = native
        self.token_ids = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
        self.block_ids = [blocks_for(length, seed) for seed, length in enumerate(lengths)]
        self.logits = [
            torch.cat([native.last_logits(self.part(index, position, position + 1)) for position in range(length)])
            for index, length in enumerate(lengths)
        ]

    def draw(self, rng: np.random.Generator) -> tuple[list[int], list[int], list[int]]:
        """Return which sequences a batch holds, and the first and last of the tokens that it computes of each."""
        num_sequences = len(self.token_ids)
        chosen = rng.permutation(num_sequences)[: rng.integers(1, num_sequences + 1)].tolist()
        ends = [int(rng.integers(1, len(self.token_ids[index]) + 1)) for index in chosen]
        # Half of the parts are one token, as they are when sequences produce.
        starts = [end - 1 if rng.random() < 0.5 else int(rng.integers(0, end)) for end in ends]
        return chosen, starts, ends

    def part(self, index: int, start: int, end: int) -> Part:
        return Part(self.token_ids[index][:end], start, self.block_ids[index])


@pytest.mark.parametrize(
    ("num_threads", "quantization"), [(1, Quantization.NONE), (3, Quantization.NONE), (2, Quantization.INT8)]
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_does_not_depend_on_its_batch_or_on_chunks(
    tmp_path: Path, kernels: str, num_threads: int, quantization: Quantization
) -> None:
    native = NativeLlama(
        rounded_llama(), tmp_path, kernels=kernels, num_threads=num_threads, quantization=quantization
    )
    lengths = [1, 5, 16, 17, 40, 64, 100, 290]
    sequences = Sequences(native, lengths)
    rng = np.random.default_rng(3)

    for _ in range(150):
        chosen, starts, ends = sequences.draw(rng)
        logits = native.last_logits(*map(sequences.part, chosen, starts, ends))

        expected = torch.stack([sequences.logits[i][end - 1] for i, end in zip(chosen, ends, strict=True)])
        assert torch.equal(logits, expected), (chosen, starts, ends)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_many_rows_at_once_are_what_they_are_alone(tmp_path: Path, quantization: Quantization) -> None:
    native = NativeLlama(rounded_llama(), tmp_path, num_blocks=1024, quantization=quantization)
    tokens = random_tokens(500)
    alone = native.last_logits(Part(tokens, 0, blocks_for(500, 1)))

    # More rows than a thread takes at once.
    together = native.last_logits(*(Part(tokens, 0, blocks_for(500, seed)) for seed in range(2, 6)))

    assert all(torch.equal(row, alone[0]) for row in together)


def test_a_shared_prefix_gives_the_same_bits(tmp_path: Path) -> None:
    native = NativeLlama(rounded_llama(), tmp_path)
    prefix, rest = random_tokens(32, 1), random_tokens(9, 2)
    alone = native.last_logits(Part(prefix + rest, 0, [50, 51, 52]))
    native.last_logits(Part(prefix, 0, [7, 3]))

    both = native.last_logits(Part(prefix + rest, 32, [7, 3, 8]), Part(prefix + rest, 32, [7, 3, 9]))

    assert torch.equal(both, alone.expand(2, -1))


def test_a_block_that_stands_twice_in_a_table_is_read_twice(tmp_path: Path) -> None:
    native = NativeLlama(rounded_llama(), tmp_path)
    tokens = random_tokens(16, 1)
    repeated = [*tokens, *tokens, 3]
    native.last_logits(Part(tokens, 0, [4]))
    for layer in native.cache.layers:
        layer[5] = layer[4]

    logits = native.last_logits(Part(repeated, 32, [4, 4, 6]), Part(repeated, 32, [4, 5, 7]))

    assert torch.equal(logits[0], logits[1])


def test_clearing_slots_leaves_what_was_before_them(tmp_path: Path) -> None:
    native = NativeLlama(rounded_llama(), tmp_path)
    tokens = random_tokens(40)
    blocks = [2, 9, 5]
    native.last_logits(Part(tokens[:21], 0, blocks))
    expected = [layer.clone() for layer in native.cache.layers]
    native.last_logits(Part(tokens, 21, [2, 9, 5]))

    slots = [
        block * BLOCK_SIZE + p % BLOCK_SIZE for p, block in ((p, [2, 9, 5][p // BLOCK_SIZE]) for p in range(21, 40))
    ]
    native.cache.clear_slots(torch.tensor(slots))

    assert all(torch.equal(layer, before) for layer, before in zip(native.cache.layers, expected, strict=True))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_that_is_not_a_number_is_told_and_spoils_no_other(tmp_path: Path, quantization: Quantization) -> None:
    model = rounded_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[70] = float("nan")
    native = NativeLlama(model, tmp_path, quantization=quantization)
    good = Part(random_tokens(20), 0, [1, 2])
    alone = native.last_logits(good)

    batch = flat_batch((good, Part([5, 70, 6], 0, [3]), Part([5, 6], 0, [4])))
    forwarded = native.forward_pass.run(batch)

    assert forwarded.is_finite.tolist() == [True, False, True]
    assert np.array_equal(forwarded.logits(np.array([True, False, True]))[:1], alone.numpy())


def _call(native: NativeLlama, **changes: Any) -> None:
    arrays: dict[str, Any] = {
        "token_ids": np.array([3]),
        "positions": np.array([0]),
        "slot_mapping": np.array([0]),
        "num_queries": np.array([1]),
        "block_tables": np.zeros((1, 1), dtype=np.int32),
        "sampled_rows": np.array([0]),
        "logits": np.zeros((1, VOCAB_SIZE), dtype=np.float32),
        "is_finite": np.zeros(1, dtype=np.uint8),
    }
    native.forward_pass.native_model.forward(**(arrays | changes))


def test_an_empty_batch_is_no_work(tmp_path: Path) -> None:
    nothing = np.array([], dtype=np.int64)
    _call(
        NativeLlama(rounded_llama(), tmp_path),
        token_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        num_queries=nothing,
        block_tables=np.zeros((0, 1), dtype=np.int32),
        sampled_rows=nothing,
        logits=np.zeros((0, VOCAB_SIZE), dtype=np.float32),
        is_finite=np.zeros(0, dtype=np.uint8),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([VOCAB_SIZE])}, "vocabulary"),
        ({"token_ids": np.array([-1])}, "vocabulary"),
        ({"slot_mapping": np.array([257 * BLOCK_SIZE])}, "slot"),
        ({"positions": np.array([BLOCK_SIZE])}, "position"),
        ({"block_tables": np.full((1, 1), 257, dtype=np.int32)}, "block"),
        ({"sampled_rows": np.array([1])}, "row"),
        ({"num_queries": np.array([2])}, "tokens"),
        ({"logits": np.zeros((1, VOCAB_SIZE - 1), dtype=np.float32)}, "vocabulary"),
        ({"positions": np.array([0, 1])}, "position"),
    ],
)
def test_arrays_that_would_reach_beyond_memory_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    native = NativeLlama(rounded_llama(), tmp_path)

    with pytest.raises(ValueError, match=message):
        _call(native, **changes)


def test_unknown_kernels_are_refused(tmp_path: Path) -> None:
    assert EXTENSION is not None

    with pytest.raises(ValueError, match="mmx"):
        NativeLlama(rounded_llama(), tmp_path, kernels="mmx")
