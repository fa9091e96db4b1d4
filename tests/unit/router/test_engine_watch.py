"""The watcher: one watch for each engine, opened again with bounded pauses; leases that come and go."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import cast

from prometheus_client import CollectorRegistry

from libs.errors import EngineLost, StoreUnavailable
from libs.obs.metrics import RouterMetrics
from libs.registry import NodeRecord, NodeRegistry
from services.router.config import RouterConfig
from services.router.engine_directory import EngineDirectory
from services.router.engine_events import WatchEvent
from services.router.engine_watch import Backoff, EngineWatcher
from services.router.policy.facts import EngineIdentity, EngineState
from services.router.prefix_index import BlockChanges
from tests.patience import PATIENCE_SECONDS
from tests.unit.router.builders import CONTRACT, Clock, chain, identity, snapshot

CONFIG = RouterConfig(
    lease_poll_seconds=0.001,
    lease_grace_seconds=15.0,
    watch_backoff_min_seconds=0.001,
    watch_backoff_max_seconds=0.002,
    snapshot_timeout_seconds=0.05,
)


class MemoryNodes:
    """Leases as a list, or a Redis that is away."""

    def __init__(self) -> None:
        self.records: list[NodeRecord] = []
        self.is_away = False
        self.num_reads = 0

    async def list_nodes(self) -> list[NodeRecord]:
        self.num_reads += 1
        if self.is_away:
            raise StoreUnavailable("Redis cannot be reached.")
        return self.records


class ScriptedEngines:
    """Each watch on an address plays what was put into its queue; an exception breaks it."""

    def __init__(self) -> None:
        self.num_opened: dict[str, int] = {}
        self.queues: dict[str, asyncio.Queue[WatchEvent | Exception]] = {}

    def queue(self, address: str) -> asyncio.Queue[WatchEvent | Exception]:
        return self.queues.setdefault(address, asyncio.Queue())

    async def watch(self, address: str) -> AsyncGenerator[WatchEvent, None]:
        self.num_opened[address] = self.num_opened.get(address, 0) + 1
        while True:
            event = await self.queue(address).get()
            if isinstance(event, Exception):
                raise event
            yield event


class WatcherUnderTest:
    def __init__(self, config: RouterConfig = CONFIG) -> None:
        self.directory = EngineDirectory(
            report_lag_seconds=0.02, load_stale_seconds=10, max_hashes_per_engine=100, max_hashes=10_000
        )
        self.nodes, self.engines, self.clock = MemoryNodes(), ScriptedEngines(), Clock()
        self.watcher = EngineWatcher(
            config,
            directory=self.directory,
            nodes=cast(NodeRegistry, self.nodes),  # The only method that a watcher calls is there.
            watch=self.engines.watch,
            metrics=RouterMetrics(CollectorRegistry()),
            clock=self.clock,
            on_change=lambda: None,
        )

    async def __aenter__(self) -> WatcherUnderTest:
        self._task = asyncio.create_task(self.watcher.run())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert not self._task.done(), self._task
        self._task.cancel()

    def lease(self, engine: EngineIdentity) -> None:
        self.nodes.records = [
            NodeRecord(
                node_id=engine.engine_id,
                gpu_type="CPU",
                total_vram_bytes=0,
                free_kv_cache_blocks=0,
                active_slots=0,
                tensor_parallel_size=1,
                address=engine.address,
                model_name=engine.model_name,
                incarnation=engine.incarnation,
                hash_contract=CONTRACT,
            )
        ]

    async def tell(self, *events: WatchEvent | Exception, address: str = "engine-0:1") -> None:
        for event in events:
            await self.engines.queue(address).put(event)

    @property
    def watched(self) -> list[str]:
        return [status.identity.engine_id for status in self.directory.statuses() if status.is_watched]

    async def polls(self, count: int = 3) -> None:
        before = self.nodes.num_reads
        await until(lambda: self.nodes.num_reads >= before + count)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


def test_pauses_double_up_to_the_bound_until_reset() -> None:
    backoff = Backoff(0.05, 0.3)

    assert [backoff.next_seconds() for _ in range(5)] == [0.05, 0.1, 0.2, 0.3, 0.3]
    backoff.reset()
    assert backoff.next_seconds() == 0.05


async def test_watches_an_engine_that_has_a_lease() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())
        await test.tell(snapshot(identity(), hashes=chain(3)))
        await until(lambda: test.watched == ["engine-0"])

        assert test.directory.index.num_hashes == 3
        await test.polls()
        assert test.engines.num_opened == {"engine-0:1": 1}


async def test_a_gap_opens_a_new_watch_and_the_cache_is_known_again() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())
        await test.tell(snapshot(identity()))
        await until(lambda: test.watched == ["engine-0"])

        await test.tell(WatchEvent(1, 2, BlockChanges((), chain(1), is_cleared=False)))
        await until(lambda: test.engines.num_opened["engine-0:1"] == 2)
        assert test.watched == []
        await test.tell(snapshot(identity(), sequence_number=2, hashes=chain(2)))

        await until(lambda: test.watched == ["engine-0"])
        assert test.directory.index.num_hashes == 2


async def test_a_broken_watch_is_opened_again_for_as_long_as_there_is_a_lease() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())
        await test.tell(*[EngineLost("gone")] * 5, snapshot(identity(incarnation=2)))

        await until(lambda: test.watched == ["engine-0"])
        assert test.engines.num_opened["engine-0:1"] == 6


async def test_an_engine_that_sends_no_snapshot_is_asked_again() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())

        await until(lambda: test.engines.num_opened.get("engine-0:1", 0) >= 2)

        assert test.watched == []


async def test_redis_that_goes_away_changes_nothing() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())
        await test.tell(snapshot(identity()))
        await until(lambda: test.watched == ["engine-0"])

        test.nodes.is_away = True
        test.clock.now += 1000
        await test.polls()

        assert test.watched == ["engine-0"]


async def test_redis_that_comes_back_empty_costs_no_engine_that_renews_within_the_grace() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())
        await test.tell(snapshot(identity()))
        await until(lambda: test.watched == ["engine-0"])

        leases, test.nodes.records = test.nodes.records, []
        test.clock.now += 14
        await test.polls()
        assert test.watched == ["engine-0"]
        test.nodes.records = leases
        await test.polls()
        test.clock.now += 14
        test.nodes.records = []
        await test.polls()

        assert test.watched == ["engine-0"]
        test.clock.now += 2
        await until(lambda: test.directory.statuses() == [])


async def test_an_engine_that_loads_again_is_kept_without_a_lease_for_as_long_as_its_watch_lives() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())
        await test.tell(snapshot(identity(incarnation=2, is_loaded=False), state=EngineState.STARTING))
        await until(lambda: test.watched == ["engine-0"])

        test.nodes.records = []
        test.clock.now += 1000
        await test.polls()
        assert test.watched == ["engine-0"]
        await test.tell(EngineLost("gone"))

        await until(lambda: not test.directory.knows_any())


async def test_an_engine_without_watch_is_forgotten_when_its_lease_ends() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())
        await until(test.directory.knows_any)

        test.nodes.records = []

        await until(lambda: not test.directory.knows_any())
        opened = dict(test.engines.num_opened)
        await asyncio.sleep(0.1)
        assert test.engines.num_opened == opened


async def test_an_engine_that_moves_is_watched_at_its_new_address() -> None:
    async with WatcherUnderTest() as test:
        test.lease(identity())
        await test.tell(snapshot(identity()))
        await until(lambda: test.watched == ["engine-0"])

        moved = dataclasses.replace(identity(), address="elsewhere:1")
        test.lease(moved)
        await test.tell(snapshot(moved), address="elsewhere:1")

        await until(lambda: [s.identity.address for s in test.directory.statuses()] == ["elsewhere:1"])
        assert test.watched == ["engine-0"]
        assert test.engines.num_opened == {"engine-0:1": 1, "elsewhere:1": 1}


async def test_configured_addresses_are_watched_without_any_lease() -> None:
    config = RouterConfig(engine_addresses=("a:1", "b:1"), lease_poll_seconds=0.001)
    async with WatcherUnderTest(config) as test:
        await test.tell(snapshot(identity("engine-a")), address="a:1")
        await test.tell(snapshot(identity("engine-b")), address="b:1")

        await until(lambda: len(test.watched) == 2)

        assert test.watched == ["engine-a", "engine-b"]
        assert not test.nodes.records


async def test_leases_over_the_bound_are_left_out() -> None:
    config = RouterConfig(max_engines=1, lease_poll_seconds=0.001)
    async with WatcherUnderTest(config) as test:
        test.lease(identity("engine-0"))
        records = test.nodes.records
        test.lease(identity("engine-1"))
        test.nodes.records = records + test.nodes.records

        await test.polls()

        assert list(test.engines.num_opened) == ["engine-0:1"]
