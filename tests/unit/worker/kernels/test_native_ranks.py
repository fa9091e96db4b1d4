"""A model that several ranks hold in parts gives what a rank that holds all of it gives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from libs.errors import InternalError, WorkerLost
from services.worker.config import Quantization
from services.worker.exchange import Exchange, ExchangeLayout
from services.worker.forward_pass import ForwardPass, TorchForwardPass
from services.worker.kernels.cpu.forward_pass import NativeForwardPass
from services.worker.kv_cache import KVCachePlan
from services.worker.layers.threads import OperatorThreads
from services.worker.models.shard import plan_shard
from services.worker.weight_files import open_weights
from services.worker.weights import WeightReader
from tests.unit.worker.kernels.native_models import (
    BLOCK_SIZE,
    EXTENSION,
    KERNELS,
    Part,
    flat_batch,
    needs_kernels,
    rounded_model,
)
from tests.unit.worker.ranks import exchanges, on_all_ranks
from tests.unit.worker.small_models import FAMILIES, VOCAB_SIZE, save_model

pytestmark = needs_kernels

MAX_NUM_TOKENS = 128
LENGTHS = (1, 7, 33, 48)


def parts() -> list[Part]:
    numbers = np.random.default_rng(5)
    # Each has room for 48 tokens.
    return [
        Part(numbers.integers(0, VOCAB_SIZE, length).tolist(), 0, [3 * index, 3 * index + 1, 3 * index + 2])
        for index, length in enumerate(LENGTHS)
    ]


def make_pass(folder: Path, rank: int, num_ranks: int, **options: Any) -> ForwardPass:
    assert EXTENSION is not None
    source = open_weights(folder)
    shard = plan_shard(source.config, rank, num_ranks)
    reader = WeightReader(source, torch.bfloat16, lambda done, total: None)
    forward_pass: ForwardPass = (
        TorchForwardPass(source.config, reader, torch.bfloat16, OperatorThreads(1), shard)
        if options.get("kernels") == "torch"
        else NativeForwardPass(
            EXTENSION, source.config, reader, block_size=BLOCK_SIZE, num_threads=2, shard=shard, **options
        )
    )
    config = shard.config_of(source.config)
    size = config.num_layers * BLOCK_SIZE * 2 * config.num_kv_heads * config.head_dim * 2
    forward_pass.make_cache(KVCachePlan(num_blocks=32, block_size=BLOCK_SIZE, bytes_per_block=size))
    return forward_pass


class Ranks:
    """All ranks of a small model."""

    def __init__(self, folder: Path, num_ranks: int, *, timeout_seconds: float = 30.0, **options: Any) -> None:
        config = open_weights(folder).config
        self.exchanges: list[Exchange] = exchanges(
            ExchangeLayout(
                num_ranks=num_ranks,
                max_num_tokens=MAX_NUM_TOKENS,
                max_head_rows=8,
                hidden_size=config.hidden_size,
                vocab_size=config.vocab_size,
            ),
            timeout_seconds=timeout_seconds,
        )
        self.passes = [make_pass(folder, rank, num_ranks, **options) for rank in range(num_ranks)]
        for forward_pass, exchange in zip(self.passes, self.exchanges, strict=True):
            forward_pass.join(exchange)

    def last_logits(self, *some: Part) -> torch.Tensor:
        """Compute a step on all ranks; returns ``[num_parts, vocab_size]``, the same on all."""
        batch = flat_batch(some)

        def step(rank: int) -> np.ndarray[Any, np.dtype[np.float32]]:
            forwarded = self.passes[rank].run(batch)
            assert forwarded.is_finite.all()
            return forwarded.logits(batch.is_sampled).copy()

        first, *others = on_all_ranks(len(self.passes), step)
        for other in others:
            np.testing.assert_array_equal(first, other)
        return torch.from_numpy(first)


@torch.inference_mode()
def whole_logits(folder: Path, *some: Part, **options: Any) -> torch.Tensor:
    batch = flat_batch(some)
    return torch.from_numpy(make_pass(folder, 0, 1, **options).run(batch).logits(batch.is_sampled)).clone()


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_what_one_gives(family: str, num_ranks: int, tmp_path: Path) -> None:
    folder = save_model(rounded_model(family, intermediate_size=200), tmp_path)

    actual = Ranks(folder, num_ranks).last_logits(*parts())

    # Sums of another order round differently, and bfloat16 keeps 8 bits of what follows from them.
    assert largest_error(actual, whole_logits(folder, *parts())) < 0.02


@pytest.mark.parametrize("family", ["llama with biases", "gemma3"])
def test_ranks_lose_no_more_in_int8_than_one_does(family: str, tmp_path: Path) -> None:
    folder = save_model(rounded_model(family, intermediate_size=200), tmp_path)

    actual = Ranks(folder, 2, quantization=Quantization.INT8).last_logits(*parts())

    # Each rank rounds its own part of a row to 8 bits, with a scale of its own: not the same, but no worse.
    exact = whole_logits(folder, *parts())
    alone = whole_logits(folder, *parts(), quantization=Quantization.INT8)
    assert largest_error(actual, exact) < 1.5 * largest_error(alone, exact)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_has_the_same_bits_in_any_batch(kernels: str, tmp_path: Path) -> None:
    folder = save_model(rounded_model("qwen3", intermediate_size=200), tmp_path)
    ranks = Ranks(folder, 2, kernels=kernels)

    together = ranks.last_logits(*parts())

    for index, part in enumerate(parts()):
        assert torch.equal(ranks.last_logits(part)[0], together[index])


@pytest.mark.parametrize("family", ["llama with biases", "qwen2", "gemma3"])
def test_torch_gives_the_same_through_the_same_memory(family: str, tmp_path: Path) -> None:
    folder = save_model(rounded_model(family, intermediate_size=200), tmp_path)

    actual = Ranks(folder, 2, kernels="torch").last_logits(*parts())

    # Torch rounds each part of a sum to bfloat16.
    assert largest_error(actual, whole_logits(folder, *parts(), kernels="torch")) < 0.03


@pytest.mark.parametrize("kernels", ["", "torch"])
def test_logits_of_any_rows_are_whole(kernels: str, tmp_path: Path) -> None:
    folder = save_model(rounded_model("llama", intermediate_size=200), tmp_path)
    ranks, batch = Ranks(folder, 2, kernels=kernels), flat_batch(parts())
    rows = batch.last_rows[::2]

    def step(rank: int) -> tuple[Any, Any, Any]:
        forwarded = ranks.passes[rank].run(batch)
        last = forwarded.logits(batch.is_sampled).copy()
        return last, forwarded.row_logits(rows).copy(), forwarded.row_logits(rows[1:]).copy()

    for last, some, fewer in on_all_ranks(2, step):
        np.testing.assert_array_equal(some, last[::2])
        np.testing.assert_array_equal(fewer, last[2::2])


@pytest.mark.parametrize("kernels", ["", "torch"])
def test_a_rank_gives_up_when_another_does_not_come(kernels: str, tmp_path: Path) -> None:
    ranks = Ranks(save_model(rounded_model("llama"), tmp_path), 2, timeout_seconds=0.2, kernels=kernels)

    with pytest.raises(WorkerLost, match=r"Rank 1 of 2 did not come to an exchange within 0\.2 seconds"):
        ranks.passes[0].run(flat_batch(parts()))

    # The late one must not go on alone either.
    with pytest.raises(WorkerLost, match="Rank 1 of 2"):
        ranks.passes[1].run(flat_batch(parts()))


@pytest.mark.parametrize("kernels", ["", "torch"])
def test_a_rank_gives_up_at_once_when_another_leaves(kernels: str, tmp_path: Path) -> None:
    ranks = Ranks(save_model(rounded_model("llama"), tmp_path), 2, timeout_seconds=600.0, kernels=kernels)

    def step(rank: int) -> None:
        if rank == 1:
            time.sleep(0.1)  # Rank 0 sleeps by now.
            ranks.exchanges[1].break_group()
        else:
            with pytest.raises(WorkerLost, match="has left"):
                ranks.passes[0].run(flat_batch(parts()))

    on_all_ranks(2, step)


def test_a_step_of_more_tokens_than_the_ranks_share_memory_for_is_refused(tmp_path: Path) -> None:
    ranks = Ranks(save_model(rounded_model("llama"), tmp_path), 2)
    long = Part([1] * (MAX_NUM_TOKENS + 1), 0, list(range(9)))

    with pytest.raises(ValueError, match="too little memory"):
        ranks.passes[0].run(flat_batch([long]))

    with pytest.raises(InternalError, match="rows of logits"):
        ranks.passes[0].run(flat_batch([Part([1], 0, [0])] * (MAX_NUM_TOKENS + 1)))
