"""Gateways whose tenants have limits, and what their Valkey says of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from services.gateway.api_keys import read_table, write_table
from services.gateway.limits.redis_counts import keys_of
from services.gateway.tenant_limits import TenantLimits
from tests.fakes.fake_generation_engine import Script
from tests.integration.gateway_process import MODEL_NAME, Gateway, Stand, open_stand, run_gateway, write_keys
from tests.integration.http_answers import CHAT, ONCE, QUESTION, Answer


def secret_of(tenant_id: str) -> str:
    """The one key of a tenant."""
    return f"sk-{tenant_id}"


def write_limits(path: Path, limits_by_tenant: Mapping[str, TenantLimits]) -> Path:
    """Write a table of tenants with one key each."""
    write_keys(path, {secret_of(tenant_id): tenant_id for tenant_id in limits_by_tenant})
    limited = {tenant_id: limits for tenant_id, limits in limits_by_tenant.items() if limits.is_limited}
    table = dataclasses.replace(read_table(path.read_bytes(), "here"), limits_by_tenant=limited)
    path.write_bytes(write_table(table))
    return path


@asynccontextmanager
async def open_limited(
    folder: Path, limits_by_tenant: Mapping[str, TenantLimits], *flags: str
) -> AsyncIterator[Stand]:
    """A gateway between fakes, whose tenants have these limits."""
    keys = write_limits(folder / "keys.json", limits_by_tenant)
    async with open_stand(folder / "data", "--api-keys-file", str(keys), *flags) as stand:
        yield stand


@asynccontextmanager
async def run_beside(stand: Stand, folder: Path, *flags: str) -> AsyncIterator[Gateway]:
    """Another gateway with the same engine and keys."""
    async with run_gateway(
        folder / "other-data",
        *("--gateway-id", "gateway-1", "--engine-addresses", stand.engine.address),
        *("--api-keys-file", str(folder / "keys.json"), *flags),
    ) as gateway:
        await gateway.wait_ready()
        yield gateway


async def ask(gateway: Gateway, tenant_id: str, path: str = CHAT, **fields: Any) -> Answer:
    """Ask for a completion, as a tenant."""
    question: dict[str, Any] = {"prompt": "Say hi."} if path == "/v1/completions" else {"messages": QUESTION}
    body = {"model": MODEL_NAME, **question, **fields}
    headers = {"Authorization": f"Bearer {secret_of(tenant_id)}", **ONCE}
    async with gateway.http.post(path, data=json.dumps(body).encode(), headers=headers | _JSON) as response:
        return Answer(response.status, dict(response.headers), await response.read())


_JSON = {"Content-Type": "application/json"}


async def leave(stand: Stand, tenant_id: str, script: Script, *, after_a_byte: bool) -> str:
    """Ask for a stream and leave; returns the request's id."""
    engine = stand.engine
    engine.scripts.append(script)
    num_submits = len(engine.submits)
    body = {"model": MODEL_NAME, "messages": QUESTION, "stream": True}
    headers = {"X-Api-Key": secret_of(tenant_id)}

    async def read() -> None:
        async with stand.gateway.http.post(CHAT, json=body, headers=headers) as response:
            await response.content.readany()
            response.close()

    reading = asyncio.create_task(read())
    await engine.wait_until(lambda: len(engine.submits) > num_submits)
    if after_a_byte:
        await reading
    else:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    request_id: str = engine.submits[-1].request_id
    await engine.wait_until(lambda: request_id in engine.aborted_ids)
    return request_id


class LimitStore:
    """What a Valkey has counted."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def holds(self, tenant_id: str) -> dict[str, int]:
        """The holds, with the ends of their leases in ms."""
        found: Any = await self._redis.zrange(keys_of(tenant_id)[0], 0, -1, withscores=True)
        return {str(hold_id): int(score) for hold_id, score in found}

    async def used_in_month(self, tenant_id: str) -> int:
        """Tokens used."""
        return int(await self._redis.hget(keys_of(tenant_id)[4], "used") or 0)

    async def numbers(self, tenant_id: str) -> list[float]:
        """Every number that is kept of a tenant."""
        _, held, requests, tokens, month, _ = keys_of(tenant_id)
        kept = [await self._redis.hgetall(key) for key in (held, requests, tokens, month)]
        return [float(part) for fields in kept for value in fields.values() for part in str(value).split()]

    async def lives_ms(self, tenant_id: str) -> dict[str, int]:
        """How long each key lives; -1 for one without an end, -2 for one that has just ended."""
        keys = [key for key in keys_of(tenant_id) if await self._redis.exists(key)]
        return {key: int(await self._redis.pttl(key)) for key in keys}

    async def now_ms(self) -> int:
        """The server's time."""
        seconds, micros = await self._redis.time()
        return int(seconds) * 1_000 + int(micros) // 1_000
