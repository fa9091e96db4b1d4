"""Limits as they are counted in Redis, for all gateways together: commands of ``rules.lua`` and their replies.

Owns the keys, the script and how a call is bounded. When a call is made is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from libs.errors import StoreUnavailable
from services.gateway.limits.rules import Decision, Standing
from services.gateway.tenant_limits import Limit, TenantLimits

if TYPE_CHECKING:
    from redis.asyncio import Redis

# Put before the rules: the server's own clock, so that gateways need not agree on the time.
SERVER_CLOCK: Final = """
local function clock_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
"""
_RULES: Final = Path(__file__).with_name("rules.lua")
_KEYS: Final = ("holds", "held_tokens", "requests", "tokens", "month", "settled")
_LIMITS: Final = tuple(Limit)
_SIGN_OF_LIFE_KEY: Final = "octavo:limits:sign_of_life"
_SIGN_OF_LIFE_MS: Final = 1_000

# What the script returns: a count, or the numbers of a decision.
Reply: TypeAlias = "int | list[int]"


@dataclass(frozen=True, slots=True)
class Command:
    """One call of the script."""

    tenant_id: str
    arguments: tuple[str | int, ...]


def reserve_command(
    tenant_id: str, limits: TenantLimits, hold_id: str, num_tokens: int, *, lease_ms: int
) -> Command:
    """Let a request take what it may need, or refuse it."""
    values = limits.by_limit
    return Command(
        tenant_id, ("reserve", hold_id, lease_ms, num_tokens, *(values.get(limit, "") for limit in _LIMITS))
    )


def settle_command(
    tenant_id: str, limits: TenantLimits, hold_id: str, num_used: int, *, waited_ms: int = 0
) -> Command:
    """End a hold of a request that has ended so long ago."""
    values = limits.by_limit
    tokens, budget = values.get(Limit.TOKENS_PER_MINUTE, ""), values.get(Limit.TOKENS_PER_MONTH, "")
    return Command(tenant_id, ("settle", hold_id, num_used, waited_ms, tokens, budget))


def renew_command(tenant_id: str, month_tokens_by_hold: Sequence[tuple[str, int]], *, lease_ms: int) -> Command:
    """Give holds a new lease."""
    return Command(tenant_id, ("renew", lease_ms, *(part for pair in month_tokens_by_hold for part in pair)))


def decision_of(reply: Reply) -> Decision | None:
    """Return the decision in the reply to ``reserve``; None where the hold was known."""
    assert isinstance(reply, list), f"a decision is a list, not {reply!r}"
    if not reply:
        return None
    is_admitted, refused_by, wait_ms, num_held, request_debt, token_debt, month_used, month_held = reply
    standing = Standing(num_held, request_debt, token_debt, month_used, month_held)
    return Decision(standing) if is_admitted else Decision(standing, _LIMITS[refused_by - 1], wait_ms)


def keys_of(tenant_id: str) -> list[str]:
    """Return a tenant's keys, which are of one hash slot."""
    return [f"octavo:limits:{{{tenant_id}}}:{name}" for name in _KEYS]


def make_limits_redis(url: str, timeout_seconds: float) -> Redis:
    """Return a client that tries once: whoever waits for it has another answer at hand."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    client: Redis = Redis.from_url(
        url,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), retries=0),
        decode_responses=True,
    )
    return client


class RedisCounts:
    """Runs commands in Redis, in their order and in one exchange."""

    def __init__(self, redis: Redis, timeout_seconds: float, *, clock: str = SERVER_CLOCK) -> None:
        self._redis = redis
        self._timeout_seconds = timeout_seconds
        self._script = clock + _RULES.read_text(encoding="utf-8")
        self._digest: str | None = None

    async def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Run commands and return their replies; none is a sign of life.

        Raises:
            StoreUnavailable: any of them failed or took too long; nobody knows which were run.
        """
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._run(commands)
        except (RedisError, OSError, EOFError, TimeoutError) as error:
            reason = str(error) or f"there was no answer within {self._timeout_seconds} s"
            raise StoreUnavailable(f"Limits cannot be counted in Redis: {reason}.") from error

    async def _run(self, commands: Sequence[Command]) -> list[Reply]:
        from redis.exceptions import NoScriptError

        if self._digest is None or not commands:
            # A server that is new to the script learns it with the first sign of life.
            self._digest = await self._redis.script_load(self._script)
        if not commands:
            # One that answers may still take nothing: a replica after a failover, or one whose memory is full.
            await self._redis.set(_SIGN_OF_LIFE_KEY, "", px=_SIGN_OF_LIFE_MS)
        replies = await self._exchange(commands, self._digest)
        unknown = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            # The server has started anew. Those that it did not know had no effect.
            await self._redis.script_load(self._script)
            again = await self._exchange([commands[index] for index in unknown], self._digest)
            for index, reply in zip(unknown, again, strict=True):
                replies[index] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    # Any: redis-py gives replies and errors no types.
    async def _exchange(self, commands: Sequence[Command], digest: str) -> list[Any]:
        if not commands:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            keys = keys_of(command.tenant_id)
            pipeline.evalsha(digest, len(keys), *keys, *command.arguments)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies
