"""The engine's rows in Redis: its lease in ``gpu_cluster_nodes`` and its blocks in ``prompt_cache_manifest``.

Redis is a mirror for others; the engine never waits for it and goes on without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from redis.asyncio import Redis

from libs.errors import StoreUnavailable
from libs.kv import PrefixHash
from libs.kv.block_pool import PoolChanges
from libs.obs import get_logger
from libs.registry import ManifestEntry, NodeRecord, NodeRegistry, PrefixRegistry
from services.engine.identity import EngineState, EngineStatus

_log = get_logger("registry_writer")

_MANIFEST_INTERVAL_SECONDS = 0.5
_MAX_BUFFERED_HASHES = 100_000
_MAX_HASHES_PER_WRITE = 2_000


class RegistryWriter:
    """Buffers changes and writes them in batches; without Redis it drops them."""

    def __init__(self, redis: Redis | None, node_id: str, *, lease_seconds: float) -> None:
        self._nodes = NodeRegistry(redis) if redis else None
        self._prefixes = PrefixRegistry(redis) if redis else None
        self._node_id = node_id
        self._lease_seconds = lease_seconds
        # Newest state of each hash that is not written yet: its block, or None when it is gone.
        self._pending: dict[PrefixHash, int | None] = {}
        self._must_clear = True
        self._is_reachable = True
        self.num_dropped = 0

    def begin_incarnation(self) -> None:
        """Void the rows written so far."""
        self._pending.clear()
        self._must_clear = True

    def note_changes(self, changes: PoolChanges) -> None:
        """Buffer changes of the prefix cache; beyond the bound they are dropped and counted."""
        if self._prefixes is None:
            return
        for prefix_hash in changes.removed:
            self._pending[prefix_hash] = None
        for prefix_hash, block in changes.stored:
            if len(self._pending) >= _MAX_BUFFERED_HASHES and prefix_hash not in self._pending:
                self.num_dropped += 1
                continue
            self._pending[prefix_hash] = block

    async def run(self, status: Callable[[], EngineStatus]) -> None:
        """Renew the lease and write batches until cancelled; then give the lease back."""
        if self._nodes is None:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew_lease(self._nodes, status))
                tasks.create_task(self._write_manifest())
        finally:
            await self.withdraw()

    async def withdraw(self) -> None:
        """Give the lease back at once, so that nobody comes here any more."""
        if self._nodes is not None:
            try:
                await self._nodes.remove(self._node_id)
            except StoreUnavailable:
                _log.warning("lease not withdrawn; it will run out", node_id=self._node_id)

    async def _renew_lease(self, nodes: NodeRegistry, status: Callable[[], EngineStatus]) -> None:
        while True:
            record = _node_record(status())
            if record is not None:
                try:
                    await nodes.renew(record, self._lease_seconds)
                    self._note_reachable(True)
                except StoreUnavailable as error:
                    self._note_reachable(False, error.message)
            # A new state should not wait for a third of the lease.
            await asyncio.sleep(min(self._lease_seconds / 3, 1.0) if record else 0.1)

    async def _write_manifest(self) -> None:
        assert self._prefixes is not None
        while True:
            await asyncio.sleep(_MANIFEST_INTERVAL_SECONDS)
            try:
                if self._must_clear:
                    await self._prefixes.clear_manifest(self._node_id)
                    self._must_clear = False
                while self._pending:
                    await self._write_batch(self._prefixes)
            except StoreUnavailable as error:
                self._note_reachable(False, error.message)

    async def _write_batch(self, prefixes: PrefixRegistry) -> None:
        now = time.time()
        batch = [self._pending.popitem() for _ in range(min(len(self._pending), _MAX_HASHES_PER_WRITE))]
        stored = [
            ManifestEntry(prefix_hash, self._node_id, (block,), now)
            for prefix_hash, block in batch
            if block is not None
        ]
        removed = [(prefix_hash, self._node_id) for prefix_hash, block in batch if block is None]
        try:
            await prefixes.write_manifest(stored, removed)
        except StoreUnavailable:
            # What came later about a hash is newer than what could not be written.
            for prefix_hash, block in batch:
                self._pending.setdefault(prefix_hash, block)
            raise

    def _note_reachable(self, is_reachable: bool, error: str = "") -> None:
        if is_reachable is not self._is_reachable:
            self._is_reachable = is_reachable
            _log.warning("registry reachability changed", is_reachable=is_reachable, error=error)


def _node_record(status: EngineStatus) -> NodeRecord | None:
    """Build the row; None while there is nothing to offer."""
    identity, load = status.identity, status.load
    contract = identity.hash_contract
    if contract is None or load is None or status.state is EngineState.DRAINING:
        return None
    return NodeRecord(
        node_id=identity.engine_id,
        gpu_type=identity.gpu_type,
        total_vram_bytes=identity.total_vram_bytes,
        free_kv_cache_blocks=load.num_available_blocks,
        active_slots=load.num_running,
        tensor_parallel_size=identity.tensor_parallel_size,
        address=identity.address,
        model_name=identity.model_name,
        incarnation=identity.incarnation,
        hash_contract=contract,
    )
