"""Where a tenant stands, in the headers by which OpenAI's clients know it. Owns their names and form."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.limits.rules import MINUTE_MS, Standing
from services.gateway.tenant_limits import NO_LIMITS, TenantLimits


class LimitReport:
    """What one request's answer says of its tenant's limits; nothing until it is told."""

    def __init__(self) -> None:
        self._limits = NO_LIMITS
        self._standing = Standing()

    def tell(self, limits: TenantLimits, standing: Standing) -> None:
        """Take where the tenant stands with this request."""
        self._limits, self._standing = limits, standing

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers for limits a minute, as far as the tenant has them."""
        requests, tokens = self._limits.requests_per_minute, self._limits.tokens_per_minute
        headers: dict[str, str] = {}
        if requests is not None:
            headers |= _headers("requests", requests, self._standing.request_debt)
        if tokens is not None:
            headers |= _headers("tokens", tokens, self._standing.token_debt)
        return headers


def _headers(unit: str, capacity: int, debt: int) -> dict[str, str]:
    taken, reset_ms = -(-debt // MINUTE_MS), -(-debt // capacity)
    return {
        f"x-ratelimit-limit-{unit}": str(capacity),
        f"x-ratelimit-remaining-{unit}": str(max(0, capacity - taken)),
        # Until everything has flowed back.
        f"x-ratelimit-reset-{unit}": _duration(reset_ms),
    }


def _duration(duration_ms: int) -> str:
    """Return a time as OpenAI writes it: 0s, 17ms, 1.5s, 1m0s."""
    minutes, rest_ms = divmod(duration_ms, MINUTE_MS)
    if minutes:
        return f"{minutes}m{rest_ms / 1_000:g}s"
    return f"{rest_ms / 1_000:g}s" if rest_ms >= 1_000 or not rest_ms else f"{rest_ms}ms"
