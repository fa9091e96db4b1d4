"""Watches on engines: finds engines, keeps one watch on each, opens it again when it breaks.

Owns the tasks, their pauses and the lease poll. What is told goes to the directory. When Redis is away, the
engines that are known stay for as long as their watches are alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from libs.errors import DeadlineExceeded, EngineLost, OctavoError, StoreUnavailable
from libs.obs import get_logger
from libs.obs.metrics import RouterMetrics
from libs.registry import NodeRecord, NodeRegistry
from services.router.config import RouterConfig
from services.router.engine_directory import EngineDirectory
from services.router.engine_events import WatchEvent, WatchTarget
from services.router.policy.facts import EngineId, EngineIdentity, EngineState
from services.router.prefix_index import ResyncNeeded

_log = get_logger("engine_watch")


class Backoff:
    """Pauses that double from ``minimum`` to ``maximum`` seconds until reset."""

    def __init__(self, minimum_seconds: float, maximum_seconds: float) -> None:
        self._minimum_seconds = minimum_seconds
        self._maximum_seconds = maximum_seconds
        self._next_seconds = minimum_seconds

    def reset(self) -> None:
        """Begin with the shortest pause again."""
        self._next_seconds = self._minimum_seconds

    def next_seconds(self) -> float:
        """Return the next pause."""
        pause = self._next_seconds
        self._next_seconds = min(self._maximum_seconds, 2 * pause)
        return pause


@dataclass(slots=True)
class _Lease:
    """An engine that has, or lately had, a lease."""

    target: WatchTarget
    last_seen_at: float


class EngineWatcher:
    """Keeps the directory current."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        directory: EngineDirectory,
        nodes: NodeRegistry | None,
        watch: Callable[[str], AsyncGenerator[WatchEvent, None]],
        metrics: RouterMetrics,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._directory = directory
        self._nodes = nodes
        self._watch = watch
        self._metrics = metrics
        self._clock = clock
        self._on_change = on_change
        self._leases: dict[EngineId, _Lease] = {}
        self._watches: dict[WatchTarget, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Watch all engines until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in self._config.engine_addresses:
                target = WatchTarget(address, engine_id=None)
                self._directory.expect(target)
                self._start_watch(tasks, target)
            if self._nodes is not None:
                await self._poll_leases(tasks, self._nodes)

    # Leases.

    async def _poll_leases(self, tasks: asyncio.TaskGroup, nodes: NodeRegistry) -> None:
        is_up = True
        while True:
            try:
                records = await nodes.list_nodes()
            except StoreUnavailable as error:
                if is_up:
                    _log.warning("leases cannot be read, going on from memory", error=error.message)
                is_up = False
            else:
                if not is_up:
                    _log.info("leases can be read again")
                is_up = True
                self._apply_leases(tasks, records)
            await asyncio.sleep(self._config.lease_poll_seconds)

    def _apply_leases(self, tasks: asyncio.TaskGroup, records: list[NodeRecord]) -> None:
        now = self._clock()
        for record in records:
            self._apply_lease(tasks, _identity_of(record), now)
        self._end_leases({EngineId(record.node_id) for record in records}, now)
        self._count_engines()
        self._on_change()

    def _apply_lease(self, tasks: asyncio.TaskGroup, leased: EngineIdentity, now: float) -> None:
        target = WatchTarget(leased.address, leased.engine_id)
        known = self._leases.get(leased.engine_id)
        if known is None and len(self._leases) >= self._config.max_engines:
            _log.warning("engine left out, there are too many", engine_id=leased.engine_id)
            return
        self._directory.set_lease(leased)
        self._leases[leased.engine_id] = _Lease(target, now)
        if known is not None and known.target != target:
            self._stop_watch(known.target)
        if leased.address not in self._config.engine_addresses and target not in self._watches:
            _log.info("engine found", engine_id=leased.engine_id, address=leased.address)
            self._start_watch(tasks, target)

    def _end_leases(self, leased_ids: set[EngineId], now: float) -> None:
        for engine_id, lease in list(self._leases.items()):
            if engine_id in leased_ids:
                continue
            if self._is_kept(engine_id, seconds_without_lease=now - lease.last_seen_at):
                continue
            _log.info("engine's lease ended", engine_id=engine_id)
            del self._leases[engine_id]
            self._stop_watch(lease.target)
            self._directory.end_lease(engine_id)

    def _is_kept(self, engine_id: EngineId, *, seconds_without_lease: float) -> bool:
        """Tell whether a watch shows that an engine without a lease is still there."""
        state = self._directory.watched_state(engine_id)
        if state is EngineState.STARTING:
            # It loads its model again and has nothing to offer; its watch tells when it has, or when it dies.
            return True
        # Redis may have lost its data, and engines write it again within seconds.
        return state is not None and seconds_without_lease < self._config.lease_grace_seconds

    # Watches.

    def _start_watch(self, tasks: asyncio.TaskGroup, target: WatchTarget) -> None:
        self._watches[target] = tasks.create_task(self._keep_watching(target), name=f"watch {target.address}")

    def _stop_watch(self, target: WatchTarget) -> None:
        task = self._watches.pop(target, None)
        if task is not None:
            task.cancel()
            self._directory.lose(target)

    async def _keep_watching(self, target: WatchTarget) -> None:
        backoff = Backoff(self._config.watch_backoff_min_seconds, self._config.watch_backoff_max_seconds)
        is_first_failure = True
        while True:
            opened_at = self._clock()
            try:
                await self._watch_once(target)
            except ResyncNeeded as error:
                self._directory.suspend(target)
                reason = str(error)
            except OctavoError as error:
                self._directory.lose(target)
                reason = error.message
            if self._clock() - opened_at >= self._config.watch_backoff_max_seconds:
                # Only a watch that lasted ends the long pauses; one that breaks again and again does not.
                backoff.reset()
                is_first_failure = True
            self._note_broken_watch(target, reason, is_first_failure)
            is_first_failure = False
            await asyncio.sleep(backoff.next_seconds())

    async def _watch_once(self, target: WatchTarget) -> None:
        """Apply the events of one watch until it breaks, which always raises."""
        timeout_seconds, now = self._config.snapshot_timeout_seconds, asyncio.get_running_loop().time
        try:
            async with (
                asyncio.timeout(timeout_seconds) as snapshot_limit,
                aclosing(self._watch(target.address)) as events,
            ):
                async for event in events:
                    was_watching = self._directory.is_watching(target)
                    self._directory.apply(target, event, self._clock())
                    is_watching = self._directory.is_watching(target)
                    if is_watching is not was_watching:
                        snapshot_limit.reschedule(None if is_watching else now() + timeout_seconds)
                        self._count_engines()
                    if is_watching and not was_watching:
                        _log.info("engine watched", address=target.address, incarnation=event.incarnation)
                    self._metrics.indexed_hashes.set(self._directory.index.num_hashes)
                    self._on_change()
        except TimeoutError as error:
            raise DeadlineExceeded(f"The engine sent no snapshot within {timeout_seconds} s.") from error
        raise EngineLost("The engine ended the watch.")

    def _note_broken_watch(self, target: WatchTarget, reason: str, is_first_failure: bool) -> None:
        self._metrics.resyncs.inc()
        level = _log.info if is_first_failure else _log.debug
        level("watch broken", address=target.address, engine_id=target.engine_id, reason=reason)
        self._count_engines()
        self._on_change()

    def _count_engines(self) -> None:
        statuses = self._directory.statuses()
        self._metrics.keep_engines(frozenset(status.identity.engine_id for status in statuses))
        num_watched = sum(status.is_watched for status in statuses)
        self._metrics.engines.labels(is_watched="true").set(num_watched)
        self._metrics.engines.labels(is_watched="false").set(len(statuses) - num_watched)
        self._metrics.indexed_hashes.set(self._directory.index.num_hashes)
        self._metrics.left_out_hashes.set(self._directory.index.num_left_out)


def _identity_of(record: NodeRecord) -> EngineIdentity:
    return EngineIdentity(
        engine_id=EngineId(record.node_id),
        incarnation=record.incarnation,
        address=record.address,
        model_name=record.model_name,
        hash_contract=record.hash_contract,
        capacity=None,
        gpu_type=record.gpu_type,
        total_vram_bytes=record.total_vram_bytes,
        tensor_parallel_size=record.tensor_parallel_size,
    )
