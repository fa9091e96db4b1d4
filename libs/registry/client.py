"""The connection to Redis."""

from __future__ import annotations

from typing import TypeAlias

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

# The type that redis-py declares for the fields of a hash.
RedisValue: TypeAlias = "bytes | bytearray | memoryview[int] | str | int | float"
RedisFields: TypeAlias = "dict[RedisValue, RedisValue]"

_TIMEOUT_SECONDS = 2.0


def make_redis(url: str) -> Redis:
    """Return a client for ``redis://``, ``rediss://`` or ``unix://`` that never waits longer than seconds."""
    client: Redis = Redis.from_url(
        url,
        socket_timeout=_TIMEOUT_SECONDS,
        socket_connect_timeout=_TIMEOUT_SECONDS,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=2),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
        decode_responses=True,
        # What a stranger wrote must not make all that is read with it unreadable.
        encoding_errors="replace",
    )
    return client
