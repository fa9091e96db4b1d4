"""Rows of prompt_prefix_cache: coalesced, bounded, dropped while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from libs.errors import StoreUnavailable
from libs.obs.metrics import RouterMetrics
from libs.registry import PrefixCacheEntry, PrefixRegistry
from services.router.policy.facts import Candidate, Forecast, ScoredCandidate
from services.router.prefix_writer import PrefixWriter
from tests.unit.router.builders import chain, facts, request


class MemoryRegistry:
    """Takes rows, or refuses as an unreachable Redis does."""

    def __init__(self) -> None:
        self.rows: list[PrefixCacheEntry] = []
        self.is_away = False
        self.was_called = asyncio.Event()

    async def write_prefix_cache(self, entries: Sequence[PrefixCacheEntry]) -> None:
        self.was_called.set()
        if self.is_away:
            raise StoreUnavailable("Redis cannot be reached.")
        self.rows += entries


class WriterUnderTest:
    def __init__(self, max_rows: int = 100) -> None:
        self.registry = MemoryRegistry()
        self.prometheus = CollectorRegistry()
        self.writer = PrefixWriter(
            cast(PrefixRegistry, self.registry),  # The only method that a writer calls is there.
            RouterMetrics(self.prometheus),
            max_rows=max_rows,
            interval_seconds=0.001,
            wall_clock=lambda: 77.0,
        )

    def note(self, name: str, num_blocks: int, num_cached: int = 0, engine_id: str = "e") -> None:
        chosen = ScoredCandidate(Candidate(facts(engine_id), Forecast(0.0, num_cached)), 1.0, ())
        self.writer.note(request(prefix_hashes=chain(num_blocks, name), num_prompt_tokens=1000), chosen)

    async def write_once(self) -> None:
        self.registry.was_called.clear()
        running = asyncio.create_task(self.writer.run())
        await asyncio.wait_for(self.registry.was_called.wait(), 5)
        await asyncio.sleep(0)
        running.cancel()

    @property
    def num_dropped(self) -> float | None:
        return self.prometheus.get_sample_value("octavo_router_prefix_rows_dropped_total")


async def test_writes_the_found_prefix_and_the_whole_prompt() -> None:
    test = WriterUnderTest()
    test.note("p", 5, num_cached=32)

    await test.write_once()

    rows = {(row.prefix_hash, row.node_id, row.token_length, row.last_accessed_at) for row in test.registry.rows}
    assert rows == {(chain(5, "p")[1], "e", 32, 77.0), (chain(5, "p")[4], "e", 80, 77.0)}


async def test_a_later_placement_replaces_the_row() -> None:
    test = WriterUnderTest()
    test.note("p", 2, engine_id="first")
    test.note("p", 2, engine_id="second")

    await test.write_once()

    assert [row.node_id for row in test.registry.rows] == ["second"]


async def test_a_prompt_without_full_blocks_has_no_row() -> None:
    test = WriterUnderTest()
    test.note("short", 0)
    test.note("p", 1)

    await test.write_once()

    assert len(test.registry.rows) == 1


async def test_drops_and_counts_what_is_over_the_bound() -> None:
    test = WriterUnderTest(max_rows=2)
    for name in "abc":
        test.note(name, 1)

    await test.write_once()

    assert len(test.registry.rows) == 2
    assert test.num_dropped == 1


@pytest.mark.parametrize("num_rows", [1, 3])
async def test_drops_and_counts_what_redis_does_not_take_and_goes_on(num_rows: int) -> None:
    test = WriterUnderTest()
    test.registry.is_away = True
    for number in range(num_rows):
        test.note(f"lost {number}", 1)
    await test.write_once()
    assert test.num_dropped == num_rows

    test.registry.is_away = False
    test.note("kept", 1)
    await test.write_once()

    assert [row.prefix_hash for row in test.registry.rows] == [chain(1, "kept")[0]]
