"""Attention over the paged KV cache.

Owns how a step's queries are grouped into padded tiles, the masks, and the attention itself. It must not know
what a request is or where blocks come from.

A step mixes sequences that compute one token with chunks of prompts. Each is cut into tiles of consecutive
queries that see a common context; tiles of similar shape form a group, and a group is attended to in one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]

# Queries in a tile at most. A tile computes scores for its whole context, so small tiles waste less above the
# diagonal of a long prompt; they also bound the mask.
MAX_TILE_QUERIES = 128

# KV slots gathered for a group at most: bounds the scratch memory and keeps it in the processor's cache.
MAX_GROUP_SLOTS = 8_192

# Cost of a tile in arbitrary units, fitted to measurements: reading a context costs as much as four queries on it,
# and calling a group's operators as much as 700 slots of one query.
_READ_COST = 4
_GROUP_COST = 700 * (_READ_COST + 1)


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Where a step's sequences lie in its flat batch, and their blocks."""

    first_rows: IntArray  # [num_seqs]: row of the first scheduled token
    num_queries: IntArray  # [num_seqs]
    context_lens: IntArray  # [num_seqs]: tokens in the cache after this step
    block_tables: NDArray[np.int32]  # [num_seqs, max_blocks], padded with the null block
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """Tiles that are attended to together, padded to a common number of queries and context."""

    num_tiles: int
    num_queries: int
    context_len: int  # a multiple of the block size
    rows: Tensor  # [num_tiles * num_queries] int64 in the flat batch; padding repeats a tile's last row
    block_ids: Tensor  # [num_tiles * context_len / block_size] int64
    mask: Tensor  # [num_tiles, 1, num_queries * group_size, context_len]: 0 or -inf, in the queries' dtype


class PagedAttention:
    """Attention of one model's shape; holds scratch memory that all layers use in turn."""

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._num_kv_heads = num_kv_heads
        self._group_size = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._scratch = torch.empty(0, dtype=dtype)

    def plan(self, layout: StepLayout, window: int | None = None) -> list[AttentionGroup]:
        """Group a step's queries; the plan serves all layers of the step that have this window.

        In a window a query sees that many of the last tokens, itself included.
        """
        tiles = _tiles_of(layout)
        groups = [
            self._make_group(layout, tiles, members, window) for members in _group_tiles(tiles, layout.block_size)
        ]
        num_slots = max(group.num_tiles * group.context_len for group in groups)
        num_values = num_slots * 2 * self._num_kv_heads * self._head_dim
        if self._scratch.numel() < num_values:
            self._scratch = torch.empty(num_values, dtype=self._dtype)
        return groups

    def attend(
        self, queries: Tensor, cache: Tensor, groups: list[AttentionGroup], scale: float | None = None
    ) -> Tensor:
        """Attend with ``queries`` ``[num_tokens, num_heads, head_dim]`` over one layer's cache.

        Scores are multiplied by ``scale``, which is one over the root of the head size unless given.

        The cache is ``[num_blocks, block_size, 2, num_kv_heads, head_dim]`` and already holds the keys and
        values of this step. Returns ``[num_tokens, num_heads * head_dim]``.
        """
        flat_queries = queries.flatten(1)
        output = torch.empty_like(flat_queries)
        blocks = cache.view(cache.shape[0], -1)
        for group in groups:
            tile_queries = flat_queries.index_select(0, group.rows)
            output.index_copy_(0, group.rows, self._attend_group(tile_queries, blocks, group, scale))
        return output

    def _attend_group(self, queries: Tensor, blocks: Tensor, group: AttentionGroup, scale: float | None) -> Tensor:
        gathered = self._scratch[: group.block_ids.numel() * blocks.shape[1]].view(-1, blocks.shape[1])
        torch.index_select(blocks, 0, group.block_ids, out=gathered)
        shape = (group.num_tiles, group.context_len, 2, self._num_kv_heads, self._head_dim)
        keys, values = gathered.view(shape).permute(2, 0, 3, 1, 4)
        # Query heads that share a KV head are further queries on the same context: torch's own handling of
        # grouped queries would compute them one by one.
        folded = (
            queries.view(group.num_tiles, group.num_queries, self._num_kv_heads, self._group_size, self._head_dim)
            .transpose(1, 2)
            .reshape(group.num_tiles, self._num_kv_heads, -1, self._head_dim)
        )
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask, scale=scale)
        return (
            attended.view(group.num_tiles, self._num_kv_heads, group.num_queries, self._group_size, self._head_dim)
            .transpose(1, 2)
            .reshape(group.num_tiles * group.num_queries, -1)
        )

    def _make_group(
        self, layout: StepLayout, tiles: _Tiles, members: IntArray, window: int | None
    ) -> AttentionGroup:
        num_queries = int(tiles.num_queries[members].max())
        num_blocks = -(-int(tiles.context_lens[members].max()) // layout.block_size)
        context_len = num_blocks * layout.block_size
        # [num_tiles, num_queries]; padding repeats the last query, so it computes what is there already.
        offsets = np.minimum(np.arange(num_queries), tiles.num_queries[members, None] - 1)
        rows = tiles.first_rows[members, None] + offsets
        last_visible = (tiles.context_lens - tiles.num_queries)[members, None] + offsets
        is_visible = np.arange(context_len) <= last_visible[:, :, None]
        if window is not None:
            is_visible &= np.arange(context_len) > last_visible[:, :, None] - window
        mask = torch.zeros(is_visible.shape, dtype=self._dtype)
        mask.masked_fill_(torch.from_numpy(~is_visible), float("-inf"))
        return AttentionGroup(
            num_tiles=len(members),
            num_queries=num_queries,
            context_len=context_len,
            rows=torch.from_numpy(rows.reshape(-1)),
            block_ids=torch.from_numpy(
                layout.block_tables[tiles.sequences[members], :num_blocks].astype(np.int64).reshape(-1)
            ),
            mask=mask.repeat_interleave(self._group_size, 1)[:, None],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Tiles of a step, one entry each."""

    sequences: IntArray  # index of the sequence in the step
    first_rows: IntArray
    num_queries: IntArray
    context_lens: IntArray  # what the last query sees


def _tiles_of(layout: StepLayout) -> _Tiles:
    num_tiles = -(-layout.num_queries // MAX_TILE_QUERIES)
    sequences = np.repeat(np.arange(len(num_tiles)), num_tiles)
    first_tiles = np.cumsum(num_tiles) - num_tiles
    first_queries = (np.arange(len(sequences)) - first_tiles[sequences]) * MAX_TILE_QUERIES
    num_queries = np.minimum(MAX_TILE_QUERIES, layout.num_queries[sequences] - first_queries)
    num_computed_before = (layout.context_lens - layout.num_queries)[sequences]
    return _Tiles(
        sequences=sequences,
        first_rows=layout.first_rows[sequences] + first_queries,
        num_queries=num_queries,
        context_lens=num_computed_before + first_queries + num_queries,
    )


def _group_tiles(tiles: _Tiles, block_size: int) -> list[IntArray]:
    """Split the tiles into groups so that padding costs less than the calls that it saves.

    Greedy over tiles in order of queries and context: a tile joins the group at hand unless the padding that
    this adds costs more than a group of its own.
    """
    order = np.lexsort((tiles.context_lens, tiles.num_queries))
    shapes = zip(
        tiles.num_queries[order].tolist(), (-(-tiles.context_lens[order] // block_size)).tolist(), strict=True
    )
    groups: list[IntArray] = []
    first, own_cost, max_queries, max_blocks = 0, 0, 0, 0
    for index, (num_queries, num_blocks) in enumerate(shapes):
        cost = num_blocks * block_size * (_READ_COST + num_queries)
        queries, blocks = max(max_queries, num_queries), max(max_blocks, num_blocks)
        num_tiles = index - first + 1
        padded_cost = num_tiles * blocks * block_size * (_READ_COST + queries)
        is_too_large = num_tiles * blocks * block_size > MAX_GROUP_SLOTS
        if index > first and (is_too_large or padded_cost - own_cost - cost > _GROUP_COST):
            groups.append(order[first:index])
            first, own_cost, queries, blocks = index, 0, num_queries, num_blocks
        own_cost, max_queries, max_blocks = own_cost + cost, queries, blocks
    groups.append(order[first:])
    return groups
