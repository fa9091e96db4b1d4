from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.worker.kv_cache import KVCache, KVCachePlan
from services.worker.layers.attention import StepLayout
from services.worker.layers.threads import OperatorThreads
from services.worker.models.decoder import Decoder, ForwardBatch
from services.worker.weight_files import open_weights
from services.worker.weights import WeightReader
from tests.unit.worker.small_models import FAMILIES, VOCAB_SIZE, expected_logits, random_model, save_model

BLOCK_SIZE = 4
NUM_BLOCKS = 256

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Loaded:
    """A small model with a cache, and transformers' model of the same weights."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, family: str = "llama", **changes: Any
    ) -> None:
        reference = random_model(family, **changes)
        self._load(save_model(reference, folder), reference, dtype)

    @classmethod
    def from_path(cls, path: Path, reference: PreTrainedModel) -> Self:
        """Load what is at ``path`` in fp32; it should be the same as ``reference``."""
        loaded = cls.__new__(cls)
        loaded._load(path, reference, torch.float32)
        return loaded

    def _load(self, path: Path, reference: PreTrainedModel, dtype: torch.dtype) -> None:
        self.reference = reference
        source = open_weights(path)
        reader = WeightReader(source, dtype, lambda done, total: None)
        self.model = Decoder(source.config, reader, dtype, OperatorThreads(2))
        config = source.config
        size = config.num_layers * BLOCK_SIZE * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        self.cache = KVCache(
            config, KVCachePlan(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, bytes_per_block=size), dtype
        )

    @torch.inference_mode()
    def logits(self, sequences: list[tuple[list[int], int, list[int]]]) -> list[torch.Tensor]:
        """Run one step; each sequence has its tokens, how many are computed already, and its blocks."""
        counts = np.array([len(tokens) - computed for tokens, computed, _ in sequences])
        contexts = np.array([len(tokens) for tokens, _, _ in sequences])
        tables = np.full((len(sequences), max(len(b) for _, _, b in sequences)), NUM_BLOCKS, dtype=np.int32)
        token_ids, positions, slots = [], [], []
        for index, (tokens, computed, blocks) in enumerate(sequences):
            tables[index, : len(blocks)] = blocks
            for position in range(computed, len(tokens)):
                token_ids.append(tokens[position])
                positions.append(position)
                slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        batch = ForwardBatch(
            torch.tensor(token_ids),
            torch.tensor(positions),
            torch.tensor(slots),
            StepLayout(np.cumsum(counts) - counts, counts, contexts, tables, BLOCK_SIZE),
        )
        hidden = self.model.forward(batch, self.cache)
        return list(torch.split(self.model.logits(hidden), counts.tolist()))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB_SIZE, count).tolist()
    return tokens


def blocks_for(num_tokens: int, seed: int) -> list[int]:
    """Return blocks in random order from a range of the seed's own."""
    count = -(-num_tokens // BLOCK_SIZE)
    blocks: list[int] = (np.random.default_rng(seed).permutation(32)[:count] + 32 * seed).tolist()
    return blocks


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"head_dim": 12},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}},
        {"rope_parameters": LLAMA3_ROPE},
        {"num_hidden_layers": 1, "rms_norm_eps": 1e-3},
    ],
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    loaded = Loaded(tmp_path, **changes)
    tokens = random_tokens(70)

    (logits,) = loaded.logits([(tokens, 0, blocks_for(70, 1))])

    torch.testing.assert_close(logits, expected_logits(loaded.reference, tokens), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_architecture_equal_transformers(tmp_path: Path, family: str) -> None:
    loaded = Loaded(tmp_path, family=family)
    tokens = random_tokens(70)

    (logits,) = loaded.logits([(tokens, 0, blocks_for(70, 1))])

    torch.testing.assert_close(logits, expected_logits(loaded.reference, tokens), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.7},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        LLAMA3_ROPE,
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_scaled_positions_equal_transformers(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    tables: dict[str, Any] = {"rope_theta": 10_000.0} | rope
    if family == "gemma3":
        # transformers looks for "truncate" in another place where there are several tables.
        tables = {
            "full_attention": {key: value for key, value in tables.items() if key != "truncate"},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        }
    loaded = Loaded(tmp_path, family=family, rope_parameters=tables)
    tokens = random_tokens(70)

    (logits,) = loaded.logits([(tokens, 0, blocks_for(70, 1))])

    torch.testing.assert_close(logits, expected_logits(loaded.reference, tokens), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_neighbours_do_not_change_logits(tmp_path: Path, family: str) -> None:
    loaded = Loaded(tmp_path, family=family)
    long, other, third = random_tokens(60, 1), random_tokens(33, 2), random_tokens(9, 3)
    blocks = {1: blocks_for(60, 1), 2: blocks_for(33, 2), 3: blocks_for(9, 3)}

    parts = []
    for start, end in ((0, 7), (7, 8), (8, 40), (40, 59), (59, 60)):
        neighbours = [(third, 0, blocks[3])] if start == 8 else [(other[: 20 + start % 13], 0, blocks[2])]
        parts.append(loaded.logits([(long[:end], start, blocks[1]), *neighbours])[0])

    torch.testing.assert_close(torch.cat(parts), expected_logits(loaded.reference, long), atol=3e-4, rtol=1e-4)


def test_many_single_tokens_at_once_equal_transformers(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path)
    all_tokens = [random_tokens(5 + 4 * seed, seed) for seed in range(1, 7)]
    tables = [blocks_for(len(tokens), seed) for seed, tokens in enumerate(all_tokens, start=1)]
    loaded.logits([(t[:-1], 0, blocks) for t, blocks in zip(all_tokens, tables, strict=True)])

    last = loaded.logits([(t, len(t) - 1, blocks) for t, blocks in zip(all_tokens, tables, strict=True)])

    for tokens, logits in zip(all_tokens, last, strict=True):
        expected = expected_logits(loaded.reference, tokens)[-1:]
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


def test_a_shared_prefix_gives_the_same_logits(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path)
    prefix, first, second = random_tokens(16, 1), random_tokens(5, 2), random_tokens(7, 3)
    shared = blocks_for(16, 1)
    loaded.logits([(prefix + first, 0, [*shared, 100, 101])])

    (logits,) = loaded.logits([(prefix + second, 16, [*shared, 102, 103])])

    expected = expected_logits(loaded.reference, prefix + second)[16:]
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


def test_bfloat16_stays_near_fp32(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, torch.bfloat16)
    tokens = random_tokens(40)

    (logits,) = loaded.logits([(tokens, 0, blocks_for(40, 1))])

    # Two layers round some ten times to 8 bits; the logits spread over several units.
    expected = expected_logits(loaded.reference, tokens)
    assert (logits - expected).norm() / expected.norm() < 0.03
