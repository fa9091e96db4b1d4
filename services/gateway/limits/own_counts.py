"""Limits by what this gateway has counted itself, in memory.

The only counts of a gateway without Redis; beside Redis those that it goes on with while Redis is away.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from libs.obs.metrics import GatewayMetrics
from services.gateway.limits.limiter import NO_HOLD, Ask, Reservation
from services.gateway.limits.rules import Decision, TenantBook

# These counts end with the process that holds, so there is no lost owner whose lease must end.
_LEASE_MS: Final = 365 * 24 * 60 * 60 * 1_000


class OwnCounts:
    """A book for each tenant that has limits; the table of keys bounds how many there are."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._books: defaultdict[str, TenantBook] = defaultdict(TenantBook)

    def reserve(self, ask: Ask) -> Decision:
        """Let a request in or refuse it."""
        book, now_ms = self._books[ask.tenant_id], self._now_ms()
        decision = book.reserve(ask.limits, ask.request_id, ask.num_tokens, now_ms=now_ms, lease_ms=_LEASE_MS)
        assert decision is not None, f"{ask.request_id} asked twice"
        return decision

    def admit(self, ask: Ask) -> None:
        """Count a request that was let in elsewhere."""
        book, now_ms = self._books[ask.tenant_id], self._now_ms()
        book.admit(ask.limits, ask.request_id, ask.num_tokens, now_ms=now_ms, lease_ms=_LEASE_MS)

    def settle(self, ask: Ask, num_used: int) -> None:
        """Count what a request has used."""
        self._books[ask.tenant_id].settle(ask.limits, ask.request_id, num_used, now_ms=self._now_ms())


class LocalLimiter:
    """Limits by the own counts alone."""

    def __init__(self, counts: OwnCounts, metrics: GatewayMetrics) -> None:
        self._counts = counts
        self._metrics = metrics

    async def reserve(self, ask: Ask) -> Reservation:
        """Decide at once."""
        decision = self._counts.reserve(ask)
        if decision.refused_by is not None:
            self._metrics.limit_refusals.labels(decision.refused_by.value).inc()
            return Reservation(decision)
        return Reservation(decision, _LocalHold(self._counts, ask) if ask.limits.is_held else NO_HOLD)

    async def run(self) -> None:
        """Wait: there is nothing to do beside requests."""
        await asyncio.Event().wait()

    async def flush(self, timeout_seconds: float) -> None:
        """Do nothing: everything is counted at once."""


class _LocalHold:
    """One request's."""

    def __init__(self, counts: OwnCounts, ask: Ask) -> None:
        self._counts = counts
        self._ask = ask

    def close(self, num_used: int) -> None:
        """Count what was used; the book knows what was counted before."""
        self._counts.settle(self._ask, num_used)
