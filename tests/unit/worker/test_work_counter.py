"""Operations and bytes of a step, against products that are listed one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from services.worker.input_batch import FlatBatch
from services.worker.step_work import MachineLimits, StepKind, StepWork
from services.worker.weights import LLAMA, ModelConfig
from services.worker.work_counter import WeightSizes, WorkCounter, weight_sizes_of

CONFIG = ModelConfig(
    architecture=LLAMA,
    num_layers=3,
    hidden_size=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=56,
    vocab_size=100,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    has_tied_embeddings=True,
    max_position=128,
)
WEIGHTS = WeightSizes(layers_bytes=70_000, head_bytes=9_000)


def batch_of(*sequences: tuple[int, int], is_sampled: tuple[bool, ...] | None = None) -> FlatBatch:
    """Return a batch of sequences of (tokens computed before, tokens computed now)."""
    before = np.array([each[0] for each in sequences])
    num_queries = np.array([each[1] for each in sequences])
    num_tokens, num_seqs = int(num_queries.sum()), len(sequences)
    positions = np.concatenate([np.arange(first, first + count) for first, count in sequences])
    return FlatBatch(
        slots=np.arange(num_seqs),
        first_rows=np.cumsum(num_queries) - num_queries,
        num_queries=num_queries,
        context_lens=before + num_queries,
        block_tables=np.zeros((num_seqs, 8), dtype=np.int32),
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        slot_mapping=np.zeros(num_tokens, dtype=np.int64),
        is_sampled=np.ones(num_seqs, dtype=np.bool_) if is_sampled is None else np.array(is_sampled),
        num_drafts=np.zeros(num_seqs, dtype=np.int64),
    )


def product(num_rows: int, num_inputs: int, num_columns: int) -> int:
    """Return the operations of a product of matrices: a multiplication and an addition for each term."""
    return 2 * num_rows * num_inputs * num_columns


def operations_listed(config: ModelConfig, batch: FlatBatch) -> int:
    total = 0
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for _ in range(config.num_layers):
        for position in batch.positions.tolist():
            for num_columns in (queries, keys, keys):
                total += product(1, config.hidden_size, num_columns)
            for _ in range(config.num_heads):
                total += product(1, config.head_dim, position + 1)  # scores
                total += product(1, position + 1, config.head_dim)  # values
            total += product(1, queries, config.hidden_size)
            total += 2 * product(1, config.hidden_size, config.intermediate_size)
            total += product(1, config.intermediate_size, config.hidden_size)
    return total + product(int(batch.is_sampled.sum()), config.hidden_size, config.vocab_size)


@pytest.mark.parametrize(
    "batch",
    [
        batch_of((0, 1)),
        batch_of((17, 1), (5, 1), (99, 1)),
        batch_of((0, 33)),
        batch_of((16, 20), (0, 7), (64, 1), is_sampled=(False, True, True)),
    ],
)
def test_operations_are_those_of_all_products(batch: FlatBatch) -> None:
    work = WorkCounter(CONFIG, WEIGHTS, kv_value_bytes=2).work_of(batch)

    assert work.num_operations == operations_listed(CONFIG, batch)


def test_bytes_are_weights_once_and_contexts_once() -> None:
    work = WorkCounter(CONFIG, WEIGHTS, kv_value_bytes=2).work_of(batch_of((16, 20), (0, 7), (64, 1)))

    assert work.weight_bytes == 79_000
    assert work.kv_bytes == (36 + 7 + 65) * 3 * 2 * 2 * 8 * 2
    assert work.num_bytes == work.weight_bytes + work.kv_bytes


def test_layers_with_a_window_attend_to_less_and_need_less() -> None:
    batch = batch_of((16, 20), (0, 7), (64, 1))
    config = dataclasses.replace(CONFIG, layer_windows=(None, 10, 10))

    work = WorkCounter(config, WEIGHTS, kv_value_bytes=2).work_of(batch)
    everywhere = WorkCounter(CONFIG, WEIGHTS, kv_value_bytes=2).work_of(batch)

    unseen = sum(max(0, position + 1 - 10) for position in batch.positions.tolist())
    assert everywhere.num_operations - work.num_operations == 2 * CONFIG.num_heads * 2 * product(1, 8, unseen)
    # Of 36 tokens the first of the last 20 sees those from the eighth on; of 65 the last sees 10.
    assert work.kv_bytes == ((36 + 7 + 65) + 2 * (29 + 7 + 10)) * 2 * 2 * 8 * 2


def test_the_head_is_not_read_when_nothing_is_sampled() -> None:
    work = WorkCounter(CONFIG, WEIGHTS, kv_value_bytes=2).work_of(batch_of((0, 20), is_sampled=(False,)))

    assert work.weight_bytes == 70_000


@pytest.mark.parametrize("is_tied", [True, False])
def test_sizes_of_plain_weights_are_all_parameters(is_tied: bool) -> None:
    config = dataclasses.replace(CONFIG, has_tied_embeddings=is_tied)
    sizes = weight_sizes_of(config, config.vocab_size, 4)

    embedding = config.vocab_size * config.hidden_size * 4
    assert sizes.head_bytes == embedding
    assert sizes.layers_bytes + sizes.head_bytes + (0 if is_tied else embedding) == config.num_parameters * 4


@pytest.mark.parametrize(
    ("num_queries", "kind"), [([1, 1], "decode"), ([1], "decode"), ([5, 2], "prefill"), ([1, 9], "mixed")]
)
def test_a_step_has_a_kind(num_queries: list[int], kind: str) -> None:
    assert StepKind.of(np.array(num_queries)).value == kind


@pytest.mark.parametrize(("num_operations", "seconds"), [(1_000, 4.0 + 2.0), (80_000, 8.0 + 2.0)])
def test_the_floor_is_the_slower_of_weights_and_operations_then_the_cache(
    num_operations: int, seconds: float
) -> None:
    work = StepWork(kind=StepKind.DECODE, num_operations=num_operations, weight_bytes=400, kv_bytes=200)

    assert work.floor_seconds(MachineLimits(bytes_per_second=100.0, operations_per_second=10_000.0)) == seconds
