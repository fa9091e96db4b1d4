"""The KV cache in the layout of the native kernels.

Owns where a slot's keys and values lie. It must not know attention. A block is a row of tiles of 16 tokens; a tile
holds, for each KV head, keys as ``[head_dim / 2, 16, 2]`` and values as ``[8, head_dim, 2]``, so that the pairs
that are multiplied together are adjacent and all heads of a block are one piece of memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.cpu.extension import Bfloat16Bits
from services.worker.kv_cache import KVCache, KVCachePlan
from services.worker.weights import ModelConfig

TILE_TOKENS = 16


class TiledKVCache(KVCache):
    """A ``KVCache`` of the same size, block by block, that orders the values inside a block in its own way."""

    def __init__(self, config: ModelConfig, plan: KVCachePlan) -> None:
        super().__init__(config, plan, torch.bfloat16)
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim

    def native_layers(self) -> list[Bfloat16Bits]:
        """Return the memory of each layer as ``[num_blocks, values of a block]``."""
        return [layer.view(layer.shape[0], -1).view(torch.int16).numpy().view(np.uint16) for layer in self.layers]

    def clear_slots(self, slots: Tensor) -> None:
        """Zero the slots ``[num_slots]`` that a failed sequence has written, so that the cache stays finite."""
        tiles, tokens = slots // TILE_TOKENS, slots % TILE_TOKENS
        for layer in self.layers:
            halves = layer.view(-1, self._num_kv_heads, 2, TILE_TOKENS * self._head_dim)
            keys = halves[:, :, 0].view(-1, self._num_kv_heads, self._head_dim // 2, TILE_TOKENS, 2)
            values = halves[:, :, 1].view(-1, self._num_kv_heads, TILE_TOKENS // 2, self._head_dim, 2)
            keys[tiles, :, :, tokens] = 0
            values[tiles, :, tokens // 2, :, tokens % 2] = 0
