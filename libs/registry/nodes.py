"""``gpu_cluster_nodes``: one Redis hash per node, alive as long as its lease.

The key ``gpu_cluster_nodes`` is the set of node ids, ``gpu_cluster_nodes:<node_id>`` the row of each.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from libs.errors import StoreUnavailable
from libs.kv import HashContract
from libs.registry.client import RedisFields

_PREFIX = "gpu_cluster_nodes"
# The set of all node ids: a poll must not scan a keyspace that also holds every cached prefix.
_NODE_IDS = _PREFIX
_MAX_NODES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A row of ``gpu_cluster_nodes``: the documented fields, then what a router needs to find the node."""

    node_id: str
    gpu_type: str
    total_vram_bytes: int
    free_kv_cache_blocks: int
    active_slots: int
    tensor_parallel_size: int
    address: str
    model_name: str
    incarnation: int
    hash_contract: HashContract

    def as_fields(self) -> RedisFields:
        """Return the fields of the Redis hash."""
        fields: RedisFields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "hash_contract"
        }
        contract = self.hash_contract
        return fields | {
            "block_size": contract.block_size,
            "hash_algorithm": contract.algorithm,
            "tokenizer_digest": contract.tokenizer_digest.hex(),
        }

    @classmethod
    def from_fields(cls, fields: dict[str, str]) -> NodeRecord:
        """Parse a Redis hash; raises KeyError or ValueError for one that is not a node's."""
        return cls(
            node_id=fields["node_id"],
            gpu_type=fields["gpu_type"],
            total_vram_bytes=int(fields["total_vram_bytes"]),
            free_kv_cache_blocks=int(fields["free_kv_cache_blocks"]),
            active_slots=int(fields["active_slots"]),
            tensor_parallel_size=int(fields["tensor_parallel_size"]),
            address=fields["address"],
            model_name=fields["model_name"],
            incarnation=int(fields["incarnation"]),
            hash_contract=HashContract(
                int(fields["block_size"]), fields["hash_algorithm"], bytes.fromhex(fields["tokenizer_digest"])
            ),
        )


class NodeRegistry:
    """Reads and writes ``gpu_cluster_nodes``."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def renew(self, record: NodeRecord, lease_seconds: float) -> None:
        """Write the node and extend its lease; raises StoreUnavailable."""
        key = f"{_PREFIX}:{record.node_id}"
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hset(key, mapping=record.as_fields())
                pipeline.pexpire(key, round(lease_seconds * 1000))
                pipeline.sadd(_NODE_IDS, record.node_id)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}.") from error

    async def remove(self, node_id: str) -> None:
        """Give the lease back; raises StoreUnavailable."""
        try:
            await self._redis.delete(f"{_PREFIX}:{node_id}")
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}.") from error

    async def list_nodes(self) -> list[NodeRecord]:
        """Return the nodes with a lease, by id; raises StoreUnavailable. A malformed row is left out."""
        try:
            node_ids = sorted(map(str, await self._redis.smembers(_NODE_IDS)))[:_MAX_NODES]
            async with self._redis.pipeline(transaction=False) as pipeline:
                for node_id in node_ids:
                    pipeline.hgetall(f"{_PREFIX}:{node_id}")
                # A row of the wrong type is somebody else's; it must not hide the others.
                rows = await pipeline.execute(raise_on_error=False)
            expired = [node_id for node_id, row in zip(node_ids, rows, strict=True) if row == {}]
            if expired:
                await self._redis.srem(_NODE_IDS, *expired)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}.") from error
        nodes: list[NodeRecord] = []
        for row in rows:
            try:
                nodes.append(NodeRecord.from_fields(row))
            except (KeyError, ValueError, TypeError):
                # A lease that ran out between the two calls, or a row that a stranger wrote.
                continue
        return sorted(nodes, key=lambda node: node.node_id)
