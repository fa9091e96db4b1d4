from __future__ import annotations

import dataclasses

import psutil
import pytest
import torch

from libs.errors import ModelLoadFailed
from services.worker.kv_cache import (
    CacheBudget,
    KVCache,
    KVCachePlan,
    MemoryState,
    measure_memory,
    plan_kv_cache,
)
from services.worker.weights import LLAMA, ModelConfig

CONFIG = ModelConfig(
    architecture=LLAMA,
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=100,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    has_tied_embeddings=True,
    max_position=128,
)
BYTES_PER_BLOCK = 3 * 16 * 2 * 2 * 8 * 2
MEMORY = MemoryState(total_bytes=10**9, available_bytes=400 * 10**6)
BY_FRACTION = CacheBudget(requested_bytes=None, fraction=0.25, limit_bytes=10**9)


def plan(budget: CacheBudget, memory: MemoryState = MEMORY, reserved_bytes: int = 10**6) -> KVCachePlan:
    return plan_kv_cache(
        CONFIG,
        block_size=16,
        dtype=torch.bfloat16,
        budget=budget,
        memory=memory,
        reserved_bytes=reserved_bytes,
    )


def test_takes_a_share_of_what_is_free() -> None:
    planned = plan(BY_FRACTION)

    assert planned.bytes_per_block == BYTES_PER_BLOCK
    assert planned.num_blocks == (399 * 10**6 // 4) // BYTES_PER_BLOCK - 1
    assert planned.size_bytes <= 399 * 10**6 // 4


def test_a_share_stays_below_the_limit() -> None:
    planned = plan(dataclasses.replace(BY_FRACTION, limit_bytes=10**6))

    assert 10**6 - BYTES_PER_BLOCK < planned.size_bytes <= 10**6


def test_takes_the_size_that_was_asked_for() -> None:
    planned = plan(dataclasses.replace(BY_FRACTION, requested_bytes=300 * 10**6))

    assert 300 * 10**6 - BYTES_PER_BLOCK < planned.size_bytes <= 300 * 10**6


def test_refuses_more_than_there_is_and_says_both_numbers() -> None:
    with pytest.raises(ModelLoadFailed, match=r"500000000 bytes.*400000000 bytes"):
        plan(dataclasses.replace(BY_FRACTION, requested_bytes=500 * 10**6))


def test_refuses_a_size_without_room_for_a_block() -> None:
    with pytest.raises(ModelLoadFailed, match=f"takes {BYTES_PER_BLOCK} bytes"):
        plan(dataclasses.replace(BY_FRACTION, requested_bytes=BYTES_PER_BLOCK))


def test_refuses_when_nothing_is_free() -> None:
    with pytest.raises(ModelLoadFailed, match="hold no KV cache"):
        plan(BY_FRACTION, reserved_bytes=10**9)


def test_memory_is_zero_and_resident_from_the_start() -> None:
    planned = KVCachePlan(num_blocks=9_999, block_size=16, bytes_per_block=BYTES_PER_BLOCK)
    before = psutil.Process().memory_info().rss

    cache = KVCache(CONFIG, planned, torch.bfloat16)
    cache.populate()

    assert len(cache.layers) == 3
    assert cache.layers[0].shape == (10_000, 16, 2, 2, 8)
    assert sum(layer.nbytes for layer in cache.layers) == planned.size_bytes
    assert not any(layer.any() for layer in cache.layers)
    # The process may give other memory back at the same time, but not half as much.
    assert psutil.Process().memory_info().rss - before > planned.size_bytes / 2


def test_measured_memory_is_within_the_machine() -> None:
    memory = measure_memory()

    assert 0 < memory.available_bytes <= memory.total_bytes <= psutil.virtual_memory().total


def test_clearing_slots_leaves_the_others() -> None:
    cache = KVCache(CONFIG, KVCachePlan(num_blocks=2, block_size=4, bytes_per_block=1536), torch.float32)
    for layer in cache.layers:
        layer.fill_(float("nan"))

    cache.clear_slots(torch.tensor([1, 6]))

    for layer in cache.layers:
        is_finite = layer.isfinite().flatten(2).all(-1).flatten()
        assert is_finite.nonzero().flatten().tolist() == [1, 6]
