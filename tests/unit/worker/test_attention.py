from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.layers import attention
from services.worker.layers.attention import PagedAttention, StepLayout

BLOCK_SIZE, HEAD_DIM = 4, 16
NUM_BLOCKS = 400


def plain_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend with the last ``len(queries)`` positions of one sequence, head by head, in fp64."""
    num_queries, num_heads, head_dim = queries.shape
    context_len, num_kv_heads = keys.shape[:2]
    output = torch.empty(num_queries, num_heads, head_dim, dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = queries[:, head].double() @ keys[:, kv_head].double().T / head_dim**0.5
        is_future = torch.arange(context_len) > torch.arange(context_len - num_queries, context_len)[:, None]
        weights = scores.masked_fill(is_future, float("-inf")).softmax(-1)
        output[:, head] = weights @ values[:, kv_head].double()
    return output.flatten(1)


class Case:
    """Random sequences in random blocks; the rest of the cache holds large numbers that must not leak."""

    def __init__(self, shapes: list[tuple[int, int]], num_heads: int, num_kv_heads: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        num_queries = np.array([queries for _, queries in shapes])
        contexts = np.array([computed + queries for computed, queries in shapes])
        num_blocks = -(-contexts // BLOCK_SIZE)
        tables = np.full((len(shapes), num_blocks.max()), NUM_BLOCKS, dtype=np.int32)
        self.cache = torch.full((NUM_BLOCKS + 1, BLOCK_SIZE, 2, num_kv_heads, HEAD_DIM), 1e4)
        self.cache[NUM_BLOCKS] = 0.0
        free = random.permutation(NUM_BLOCKS).tolist()
        self.keys, self.values = [], []
        for index, (context, count) in enumerate(zip(contexts.tolist(), num_blocks.tolist(), strict=True)):
            tables[index, :count] = [free.pop() for _ in range(count)]
            kv = torch.randn(context, 2, num_kv_heads, HEAD_DIM, generator=generator)
            positions = torch.arange(context)
            blocks = torch.from_numpy(tables[index].astype(np.int64))[positions // BLOCK_SIZE]
            self.cache[blocks, positions % BLOCK_SIZE] = kv
            self.keys.append(kv[:, 0])
            self.values.append(kv[:, 1])
        self.queries = torch.randn(int(num_queries.sum()), num_heads, HEAD_DIM, generator=generator) * 2
        self.layout = StepLayout(np.cumsum(num_queries) - num_queries, num_queries, contexts, tables, BLOCK_SIZE)

    def attend(self) -> torch.Tensor:
        paged = PagedAttention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=HEAD_DIM,
            dtype=self.queries.dtype,
        )
        return paged.attend(self.queries, self.cache, paged.plan(self.layout))

    def expected(self) -> torch.Tensor:
        parts = torch.split(self.queries, self.layout.num_queries.tolist())
        return torch.cat([plain_attention(q, k, v) for q, k, v in zip(parts, self.keys, self.values, strict=True)])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize(
    "shapes",
    [
        [(0, 1)],
        [(7, 1), (8, 1), (200, 1), (3, 1)],
        [(0, 37)],
        [(30, 20), (0, 5), (100, 1), (0, 1), (64, 1)],
        [(0, 9 + index) for index in range(12)],
    ],
)
def test_paged_equals_plain(shapes: list[tuple[int, int]], num_heads: int, num_kv_heads: int) -> None:
    case = Case(shapes, num_heads, num_kv_heads)

    torch.testing.assert_close(case.attend().double(), case.expected(), atol=2e-5, rtol=2e-5)


def test_long_chunks_are_cut_into_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_TILE_QUERIES", 16)
    monkeypatch.setattr(attention, "MAX_GROUP_SLOTS", 64)
    case = Case([(20, 75), (0, 16), (5, 17), (90, 1)], 6, 2)

    torch.testing.assert_close(case.attend().double(), case.expected(), atol=2e-5, rtol=2e-5)


def test_random_mixes_equal_plain() -> None:
    random = np.random.default_rng(8)
    for seed in range(12):
        shapes = [
            (int(random.integers(0, 60)), int(random.choice([1, 1, 1, int(random.integers(2, 40))])))
            for _ in range(int(random.integers(1, 14)))
        ]
        case = Case(shapes, 6, 2, seed)

        torch.testing.assert_close(case.attend().double(), case.expected(), atol=2e-5, rtol=2e-5)


def test_sequences_may_share_blocks() -> None:
    case = Case([(19, 1), (15, 1)], 6, 2)
    case.layout.block_tables[1, :4] = case.layout.block_tables[0, :4]
    case.keys[1], case.values[1] = case.keys[0][:16], case.values[0][:16]

    torch.testing.assert_close(case.attend().double(), case.expected(), atol=2e-5, rtol=2e-5)


def test_bfloat16_stays_near_the_exact_result() -> None:
    case = Case([(100, 1), (0, 30)], 6, 2)
    case.queries, case.cache = case.queries.bfloat16(), case.cache.bfloat16()

    # Inputs are rounded to 8 bits; the sums themselves are kept in fp32.
    torch.testing.assert_close(case.attend().double(), case.expected(), atol=0.06, rtol=0.06)
