"""The limits of a tenant: which there are, and their values. It must not know how they are counted or kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class Limit(StrEnum):
    """What of a tenant's use may be limited; the words of the table of keys, of refusals and of metrics."""

    # Requests that are served at once.
    PARALLEL_REQUESTS = "max_parallel_requests"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    # Tokens of prompts and of answers together, here and below.
    TOKENS_PER_MINUTE = "tokens_per_minute"
    # A budget, for each calendar month in UTC.
    TOKENS_PER_MONTH = "tokens_per_month"


# Times 60,000, what is left of a token in a millisecond, all below stay whole numbers of a double (2**53).
MAX_BY_LIMIT: Final[Mapping[Limit, int]] = {
    Limit.PARALLEL_REQUESTS: 1_000_000,
    Limit.REQUESTS_PER_MINUTE: 1_000_000_000,
    Limit.TOKENS_PER_MINUTE: 1_000_000_000,
    Limit.TOKENS_PER_MONTH: 1_000_000_000_000_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """A tenant's limits, each at least one; None is no limit."""

    max_parallel_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_month: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether there is any limit."""
        return any(value is not None for value in self._values)

    @property
    def is_held(self) -> bool:
        """Whether a request holds something of a limit until it ends; only requests a minute are not given back."""
        return bool(self.by_limit.keys() - {Limit.REQUESTS_PER_MINUTE})

    @property
    def by_limit(self) -> dict[Limit, int]:
        """The limits that there are."""
        return {limit: value for limit, value in zip(Limit, self._values, strict=True) if value is not None}

    def changed(self, changes: Mapping[Limit, int | None]) -> TenantLimits:
        """Return the limits with these values; None takes a limit away."""
        return replace(self, **{limit.value: value for limit, value in changes.items()})

    @property
    def _values(self) -> tuple[int | None, ...]:
        """The values in the order of ``Limit``."""
        return (
            self.max_parallel_requests,
            self.requests_per_minute,
            self.tokens_per_minute,
            self.tokens_per_month,
        )


NO_LIMITS: Final = TenantLimits()
