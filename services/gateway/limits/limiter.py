"""What a request asks of its tenant's limits and what it gets: the seam between requests and those who count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from services.gateway.limits.rules import Decision
from services.gateway.tenant_limits import TenantLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What one request may need; its id is its own for ever."""

    tenant_id: str
    limits: TenantLimits
    request_id: str
    # Those of its prompts, and all that its answers may have.
    num_tokens: int


class Hold(Protocol):
    """What a request holds of its tenant's limits until it is closed."""

    def close(self, num_used: int) -> None:
        """Give the place back, and the tokens that were not used; only the first time counts."""


class _NoHold:
    """Of a request that holds nothing."""

    def close(self, num_used: int) -> None:
        """Do nothing."""


NO_HOLD: Final = _NoHold()


@dataclass(frozen=True, slots=True)
class Reservation:
    """What was decided, and the hold of a request that may be served."""

    decision: Decision
    hold: Hold = NO_HOLD


class Limiter(Protocol):
    """Counts what tenants use."""

    async def reserve(self, ask: Ask) -> Reservation:
        """Take what a request may need, or refuse it and take nothing; never fails, and never waits long."""

    async def run(self) -> None:
        """Do what must be done beside requests, until cancelled."""

    async def flush(self, timeout_seconds: float) -> None:
        """Hand over what requests have used that is not counted yet, within a time."""
