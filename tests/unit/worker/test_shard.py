"""The division of a model among ranks."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import ModelLoadFailed
from services.worker.models.description import Attention, FeedForward, Projection, Span, describe
from services.worker.models.shard import ModelShard, describe_shard, plan_shard
from services.worker.weights import GEMMA3, LLAMA, QWEN2, ModelConfig


def model(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": LLAMA,
        "num_layers": 2,
        "hidden_size": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "has_tied_embeddings": True,
        "max_position": 8192,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def shards_of(config: ModelConfig, num_ranks: int) -> list[ModelShard]:
    return [plan_shard(config, rank, num_ranks) for rank in range(num_ranks)]


def indices(spans: list[Span]) -> list[int]:
    return list(chain.from_iterable(range(span.first, span.end) for span in spans))


@st.composite
def divisions(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    num_kv_heads, group_size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    num_ranks = draw(st.integers(1, num_kv_heads * group_size))
    config = model(
        num_heads=num_kv_heads * group_size,
        num_kv_heads=num_kv_heads,
        intermediate_size=draw(st.integers(64 * num_ranks, 5_000)),
        vocab_size=draw(st.integers(32 * num_ranks, 5_000)),
    )
    return config, num_ranks


@given(divisions())
def test_every_query_head_inner_column_and_token_belongs_to_one_rank(division: tuple[ModelConfig, int]) -> None:
    config, num_ranks = division
    try:
        shards = shards_of(config, num_ranks)
    except ModelLoadFailed:
        # More ranks share a KV head than it has query heads.
        assert num_ranks > config.num_kv_heads
        return

    assert indices([shard.query_heads for shard in shards]) == list(range(config.num_heads))
    assert indices([shard.inner for shard in shards]) == list(range(config.intermediate_size))
    assert indices([shard.head_rows for shard in shards]) == list(range(config.vocab_size))


@given(divisions())
def test_every_query_head_lies_beside_its_kv_head(division: tuple[ModelConfig, int]) -> None:
    config, num_ranks = division
    try:
        shards = shards_of(config, num_ranks)
    except ModelLoadFailed:
        return
    group_size = config.num_heads // config.num_kv_heads

    for shard in shards:
        local = shard.config_of(config)
        for index, head in enumerate(range(shard.query_heads.first, shard.query_heads.end)):
            kv_index = index // (local.num_heads // local.num_kv_heads)
            assert shard.kv_heads.first + kv_index == head // group_size


@given(divisions())
def test_kv_heads_are_held_once_unless_there_are_fewer_than_ranks(division: tuple[ModelConfig, int]) -> None:
    config, num_ranks = division
    try:
        holders = Counter(indices([shard.kv_heads for shard in shards_of(config, num_ranks)]))
    except ModelLoadFailed:
        return

    assert set(holders) == set(range(config.num_kv_heads))
    assert sum(holders.values()) == max(config.num_kv_heads, num_ranks)
    # As even as can be.
    assert max(holders.values()) - min(holders.values()) <= 1


def test_heads_that_do_not_divide_evenly_give_the_first_ranks_more() -> None:
    first, second = shards_of(model(), 2)

    assert (first.kv_heads, first.query_heads) == (Span(0, 2), Span(0, 6))
    assert (second.kv_heads, second.query_heads) == (Span(2, 3), Span(6, 9))
    assert (first.inner, second.inner) == (Span(0, 768), Span(768, 1536))


def test_a_single_kv_head_is_held_by_all() -> None:
    shards = shards_of(model(architecture=GEMMA3, num_heads=4, num_kv_heads=1), 2)

    assert [shard.kv_heads for shard in shards] == [Span(0, 1)] * 2
    assert [shard.query_heads for shard in shards] == [Span(0, 2), Span(2, 4)]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (model(num_heads=2, num_kv_heads=1), "query heads"),
        (model(intermediate_size=128), "inner columns"),
        (model(vocab_size=64), "tokens"),
    ],
)
def test_a_model_that_is_too_small_for_so_many_ranks_is_refused(config: ModelConfig, what: str) -> None:
    with pytest.raises(ModelLoadFailed, match=f"too few .*{what} for 3 ranks"):
        shards_of(config, 3)


def test_one_rank_has_the_model_as_it_is() -> None:
    config = model(has_output_bias=True)

    assert describe_shard(config, plan_shard(config, 0, 1)) == describe(config)


def test_parts_lie_where_the_heads_and_columns_of_the_rank_do() -> None:
    config = model(architecture=QWEN2, has_qkv_bias=True, has_tied_embeddings=False)

    description = describe_shard(config, plan_shard(config, 1, 2))

    attention, feed_forward = description.operations[:2]
    assert isinstance(attention, Attention)
    assert isinstance(feed_forward, FeedForward)
    assert place(attention.query) == ((6 * 64, 3 * 64, 9 * 64), (0, 576, 576))
    assert place(attention.key) == place(attention.value) == ((2 * 64, 64, 3 * 64), (0, 576, 576))
    assert place(attention.output) == ((0, 576, 576), (6 * 64, 3 * 64, 9 * 64))
    assert place(feed_forward.gate) == place(feed_forward.up) == ((768, 768, 1536), (0, 576, 576))
    assert place(feed_forward.down) == ((0, 576, 576), (768, 768, 1536))
    assert description.head is not None
    assert place(description.head) == ((24576, 24576, 49152), (0, 576, 576))
    assert description.head_rows == Span(24576, 49152)


def test_a_bias_of_a_sum_is_added_by_rank_0_alone() -> None:
    config = model(has_qkv_bias=True, has_output_bias=True)

    attentions = [describe_shard(config, shard).operations[0] for shard in shards_of(config, 2)]

    biases = [
        (item.query.bias is not None, item.output.bias is not None)
        for item in attentions
        if isinstance(item, Attention)
    ]
    assert biases == [(True, True), (True, False)]


def place(projection: Projection) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return first, count and stored count of outputs and of inputs."""
    part = projection.part
    assert part is not None
    return (
        (part.first_output, projection.num_outputs, part.num_stored_outputs),
        (part.first_input, projection.num_inputs, part.num_stored_inputs),
    )
