"""What one rank of a tensor-parallel group holds of a model.

Owns the division: heads of attentions, the inner columns of feed-forwards, and rows of the head, as in Megatron-LM
(Shoeybi et al., 2019, section 3). It must not know how ranks meet or who computes what a rank holds.

Queries, keys, values, gates and ups are divided by their outputs; what maps back into the residual stream is
divided by its inputs, so that each operation ends in one sum over the ranks. Embedding and norms are held by all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from libs.errors import ModelLoadFailed
from services.worker.models.description import (
    Attention,
    FeedForward,
    ModelDescription,
    Operation,
    Part,
    Projection,
    Span,
    describe,
)
from services.worker.weights import ModelConfig

# Inner columns are divided in whole blocks of the inputs that int8 weights mix, so that a shard's blocks are the
# model's own; rows of the head in whole panels of the native kernels, of which a tied head is a part.
_INNER_UNIT = 64
_HEAD_UNIT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """The part of one rank; indices are those of the whole model."""

    rank: int
    num_ranks: int
    query_heads: Span
    kv_heads: Span  # held by other ranks as well where there are fewer than ranks
    inner: Span  # columns of gates and ups
    head_rows: Span  # token ids whose logits this rank computes

    def config_of(self, config: ModelConfig) -> ModelConfig:
        """Return the shape of this rank's part of the model that ``config`` is about."""
        return dataclasses.replace(
            config,
            num_heads=self.query_heads.size,
            num_kv_heads=self.kv_heads.size,
            intermediate_size=self.inner.size,
        )


def plan_shard(config: ModelConfig, rank: int, num_ranks: int) -> ModelShard:
    """Divide a model evenly, as far as whole heads and blocks allow; sizes differ by one head or block at most.

    KV heads go to one rank each, with the query heads that share them. Where there are fewer KV heads than ranks,
    each is held by several ranks, which divide its query heads.

    Raises:
        ModelLoadFailed: when a rank would be left without heads, columns or rows.
    """
    assert 0 <= rank < num_ranks, f"there is no rank {rank} of {num_ranks}"
    group_size = config.num_heads // config.num_kv_heads
    if num_ranks <= config.num_kv_heads:
        kv_heads = _share(config.num_kv_heads, rank, num_ranks)
        query_heads = Span(kv_heads.first * group_size, kv_heads.end * group_size)
    else:
        kv_heads, query_heads = _share_of_one_kv_head(config, rank, num_ranks)
    shard = ModelShard(
        rank=rank,
        num_ranks=num_ranks,
        query_heads=query_heads,
        kv_heads=kv_heads,
        inner=_share_in_units(config.intermediate_size, _INNER_UNIT, rank, num_ranks),
        head_rows=_share_in_units(config.vocab_size, _HEAD_UNIT, rank, num_ranks),
    )
    for name, span in (
        ("query heads", shard.query_heads),
        (f"blocks of {_INNER_UNIT} inner columns", shard.inner),
        (f"blocks of {_HEAD_UNIT} tokens", shard.head_rows),
    ):
        if span.size < 1:
            raise ModelLoadFailed(
                f"This model has too few {name} for {num_ranks} ranks; serve it with a smaller "
                "tensor_parallel_size."
            )
    return shard


def describe_shard(config: ModelConfig, shard: ModelShard) -> ModelDescription:
    """Describe what a rank computes of the model that ``config`` is about.

    The operations are those of the whole model with smaller weights, whose parts say where they lie in the stored
    ones. A bias of what goes back into the residual stream belongs to rank 0 alone: it is added once.
    """
    description = describe(shard.config_of(config))
    if shard.num_ranks == 1:
        return description
    return dataclasses.replace(
        description,
        operations=tuple(_part_of_operation(item, config, shard) for item in description.operations),
        head=None if description.head is None else _rows(description.head, shard.head_rows),
        head_rows=shard.head_rows,
        unused=(*description.unused, *_biases_of_others(description, shard)),
    )


def _biases_of_others(description: ModelDescription, shard: ModelShard) -> list[str]:
    if shard.rank == 0:
        return []
    outputs = [item.output if isinstance(item, Attention) else item.down for item in description.operations]
    return [output.bias for output in outputs if output.bias is not None]


def _part_of_operation(operation: Operation, config: ModelConfig, shard: ModelShard) -> Operation:
    if isinstance(operation, FeedForward):
        return dataclasses.replace(
            operation,
            gate=_outputs(operation.gate, shard.inner.first, config.intermediate_size),
            up=_outputs(operation.up, shard.inner.first, config.intermediate_size),
            down=_inputs(operation.down, shard.inner.first, config.intermediate_size, shard),
        )
    head_dim = config.head_dim
    first_query, num_queries = shard.query_heads.first * head_dim, config.num_heads * head_dim
    first_key, num_keys = shard.kv_heads.first * head_dim, config.num_kv_heads * head_dim
    assert isinstance(operation, Attention), f"{operation} is neither attention nor feed-forward"
    return dataclasses.replace(
        operation,
        query=_outputs(operation.query, first_query, num_queries),
        key=_outputs(operation.key, first_key, num_keys),
        value=_outputs(operation.value, first_key, num_keys),
        output=_inputs(operation.output, first_query, num_queries, shard),
    )


def _outputs(projection: Projection, first: int, num_stored: int) -> Projection:
    return dataclasses.replace(
        projection,
        part=Part(first_output=first, num_stored_outputs=num_stored, num_stored_inputs=projection.num_inputs),
    )


def _inputs(projection: Projection, first: int, num_stored: int, shard: ModelShard) -> Projection:
    return dataclasses.replace(
        projection,
        bias=projection.bias if shard.rank == 0 else None,
        part=Part(first_input=first, num_stored_outputs=projection.num_outputs, num_stored_inputs=num_stored),
    )


def _rows(head: Projection, rows: Span) -> Projection:
    part = Part(first_output=rows.first, num_stored_outputs=head.num_outputs, num_stored_inputs=head.num_inputs)
    return dataclasses.replace(head, num_outputs=rows.size, part=part)


def _share_of_one_kv_head(config: ModelConfig, rank: int, num_ranks: int) -> tuple[Span, Span]:
    """Return the KV head that this rank shares with others, and its query heads."""
    group_size = config.num_heads // config.num_kv_heads
    for kv_head in range(config.num_kv_heads):
        ranks = _share(num_ranks, kv_head, config.num_kv_heads)
        if ranks.first <= rank < ranks.end:
            queries = _share(group_size, rank - ranks.first, ranks.size)
            first = kv_head * group_size
            return Span(kv_head, kv_head + 1), Span(first + queries.first, first + queries.end)
    raise AssertionError(f"rank {rank} of {num_ranks} shares no KV head")


def _share_in_units(count: int, unit: int, rank: int, num_ranks: int) -> Span:
    units = _share(-(-count // unit), rank, num_ranks)
    return Span(min(units.first * unit, count), min(units.end * unit, count))


def _share(count: int, index: int, num_shares: int) -> Span:
    """Return one of so many consecutive shares; the larger ones come first."""
    size, num_larger = divmod(count, num_shares)
    first = index * size + min(index, num_larger)
    return Span(first, first + size + (1 if index < num_larger else 0))
