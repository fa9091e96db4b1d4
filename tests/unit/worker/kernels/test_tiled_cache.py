"""The native side's cache keeps the promises of the cache that it stands for."""

from __future__ import annotations

import torch

from services.worker.kernels.cpu.cache import TiledKVCache
from services.worker.kv_cache import KVCachePlan
from tests.unit.worker.test_kv_cache import BYTES_PER_BLOCK, CONFIG


def test_a_copied_block_holds_the_same_and_its_neighbours_are_left_alone() -> None:
    cache = TiledKVCache(CONFIG, KVCachePlan(num_blocks=4, block_size=16, bytes_per_block=BYTES_PER_BLOCK))
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in cache.layers]

    cache.copy_blocks(torch.tensor([1]), torch.tensor([3]))

    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[3], old[1])
        assert torch.equal(layer[:3], old[:3])
