from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import ModelLoadFailed
from services.worker import kv_cache
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


@given(
    available=st.integers(0, 2**40),
    reserved=st.integers(0, 2**40),
    budget=st.builds(
        CacheBudget,
        requested_bytes=st.none() | st.integers(1, 2**40),
        fraction=st.floats(0.01, 0.99),
        limit_bytes=st.integers(1, 2**40),
    ),
)
def test_never_takes_more_than_was_measured_free(available: int, reserved: int, budget: CacheBudget) -> None:
    try:
        planned = plan(budget, MemoryState(2**41, available), reserved)
    except ModelLoadFailed:
        return

    assert planned.size_bytes <= available - reserved
    assert planned.size_bytes <= (budget.requested_bytes or budget.limit_bytes)


class Machine:
    """The files of a control group, and a machine with 64 GB of which 40 are free."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        names = tuple(str(folder / name) for name in ("memory.max", "memory.current", "memory.stat"))
        monkeypatch.setattr(kv_cache, "_CGROUP_LIMITS", (names,))
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * 10**9, available=40 * 10**9)
        )

    def limit(self, limit: str, current: int, statistics: str = "") -> None:
        for name, text in (("memory.max", limit), ("memory.current", str(current)), ("memory.stat", statistics)):
            (self._folder / name).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_without_a_control_group_the_machine_is_the_limit(machine: Machine) -> None:
    assert measure_memory() == MemoryState(64 * 10**9, 40 * 10**9)


def test_a_control_group_without_a_limit_changes_nothing(machine: Machine) -> None:
    machine.limit("max", 5 * 10**9)

    assert measure_memory() == MemoryState(64 * 10**9, 40 * 10**9)


def test_a_control_group_leaves_what_it_has_not_used(machine: Machine) -> None:
    machine.limit(str(8 * 10**9), 5 * 10**9)

    assert measure_memory() == MemoryState(8 * 10**9, 3 * 10**9)


def test_file_pages_of_a_control_group_can_be_taken_back(machine: Machine) -> None:
    machine.limit(str(8 * 10**9), 5 * 10**9, f"anon 9\ninactive_file {10**9}\nactive_file 77")

    assert measure_memory() == MemoryState(8 * 10**9, 4 * 10**9)


def test_the_machine_is_the_limit_when_it_has_less_free_than_the_control_group(machine: Machine) -> None:
    machine.limit(str(60 * 10**9), 10**9)

    assert measure_memory() == MemoryState(60 * 10**9, 40 * 10**9)


def test_a_cache_stays_within_a_control_group(machine: Machine) -> None:
    machine.limit(str(2 * 10**9), 1_500 * 10**6)
    greedy = CacheBudget(requested_bytes=None, fraction=0.9, limit_bytes=2**60)

    planned = plan(greedy, measure_memory(), reserved_bytes=100 * 10**6)

    assert planned.size_bytes <= 360 * 10**6


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
