"""``prompt_cache_manifest`` (written by engines) and ``prompt_prefix_cache`` (written by routers)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from libs.errors import StoreUnavailable
from libs.kv import PrefixHash
from libs.kv.prefix_hash import HASH_BYTES
from libs.registry.client import RedisFields

# What a pattern of keys does not take as it stands.
_GLOB, _ESCAPED = re.compile(r"[*?\[\]\\^]"), r"\\\g<0>"
_MANIFEST, _PREFIX_CACHE = "prompt_cache_manifest", "prompt_prefix_cache"


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """A row of ``prompt_cache_manifest``.

    ``block_indices`` names the block that holds the last tokens of the prefix; the blocks before it are found
    by the hashes before it, so that rows stay small however long the prefix is.
    """

    prefix_hash: PrefixHash
    node_id: str
    block_indices: tuple[int, ...]
    last_accessed: float


@dataclass(frozen=True, slots=True)
class PrefixCacheEntry:
    """A row of ``prompt_prefix_cache``: the node that a router last sent this prefix to."""

    prefix_hash: PrefixHash
    node_id: str
    token_length: int
    last_accessed_at: float


class PrefixRegistry:
    """Writes both tables in pipelined batches; a row that is not written again expires."""

    def __init__(self, redis: Redis, *, row_ttl_seconds: float = 3600.0) -> None:
        self._redis = redis
        self._row_ttl_ms = round(row_ttl_seconds * 1000)

    async def write_manifest(
        self, stored: Sequence[ManifestEntry], removed: Iterable[tuple[PrefixHash, str]] = ()
    ) -> None:
        """Apply removals (hash, node_id), then stores, in one round trip; raises StoreUnavailable."""
        rows: list[tuple[str, RedisFields]] = [
            (
                f"{_MANIFEST}:{entry.prefix_hash.hex()}:{entry.node_id}",
                {
                    "prefix_hash": entry.prefix_hash.hex(),
                    "node_id": entry.node_id,
                    "block_indices": json.dumps(entry.block_indices),
                    "last_accessed": entry.last_accessed,
                },
            )
            for entry in stored
        ]
        await self._write(rows, [f"{_MANIFEST}:{prefix.hex()}:{node_id}" for prefix, node_id in removed])

    async def write_prefix_cache(self, entries: Sequence[PrefixCacheEntry]) -> None:
        """Write rows in one round trip; raises StoreUnavailable."""
        rows: list[tuple[str, RedisFields]] = [
            (
                f"{_PREFIX_CACHE}:{entry.prefix_hash.hex()}",
                {
                    "prefix_hash": entry.prefix_hash.hex(),
                    "node_id": entry.node_id,
                    "token_length": entry.token_length,
                    "last_accessed_at": entry.last_accessed_at,
                },
            )
            for entry in entries
        ]
        await self._write(rows, [])

    async def clear_manifest(self, node_id: str) -> None:
        """Remove a node's rows, as when its worker was lost; raises StoreUnavailable."""
        try:
            batch: list[str] = []
            # As many characters as a hash has, so that a name which ends like this one is another.
            pattern = f"{_MANIFEST}:{'?' * (2 * HASH_BYTES)}:{_GLOB.sub(_ESCAPED, node_id)}"
            async for key in self._redis.scan_iter(pattern, count=1000):
                batch.append(key)
                if len(batch) == 1000:
                    await self._redis.unlink(*batch)
                    batch.clear()
            if batch:
                await self._redis.unlink(*batch)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}.") from error

    async def _write(self, rows: Sequence[tuple[str, RedisFields]], removed: Sequence[str]) -> None:
        if not rows and not removed:
            return
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                if removed:
                    pipeline.unlink(*removed)
                for key, fields in rows:
                    pipeline.hset(key, mapping=fields)
                    pipeline.pexpire(key, self._row_ttl_ms)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}.") from error
