"""How a tenant's limits are counted and when a request is refused, as a pure core: no I/O, and time is an argument.

``rules.lua`` has the same rules for Redis, step by step; a test runs both on random histories and compares them.

- **Holds.** A request holds its place and its tokens until it ends, under an id that names its owner, and only for
  the time of a lease that its owner renews. There is no counter of places that a lost owner could leave too high.
- **Buckets** (requests and tokens a minute) are kept as debts: what was taken and has not flowed back. A debt is
  counted in 1/60,000 of a token, of which in each millisecond a whole number flows back, the bucket's capacity, so
  that everything is exact. It is the token bucket of RFC 2697, section 3, with a burst of a minute's worth.
- **The month** is a fixed window in UTC: what was used and what is held must stay within the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Final

from services.gateway.tenant_limits import Limit, TenantLimits

MINUTE_MS: Final = 60_000
# Nobody knows when a request will end; who waits so long finds out at little cost.
PARALLEL_WAIT_MS: Final = 1_000
# For so long a hold that was settled is known, so that what is sent twice is counted once.
SETTLED_MS: Final = 120_000


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a tenant stands after a decision. Debts are in 1/60,000 of a request or token; 0 where not limited."""

    num_held: int = 0
    request_debt: int = 0
    token_debt: int = 0
    month_used: int = 0
    month_held: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a request may be served; ``refused_by`` is the limit for which it would have to wait longest."""

    standing: Standing
    refused_by: Limit | None = None
    wait_ms: int = 0


@dataclass(slots=True)
class Bucket:
    """What was taken of a minute's worth and has not flowed back by ``at_ms``."""

    debt: int = 0
    at_ms: int = 0

    def debt_at(self, now_ms: int, capacity: int) -> int:
        """Return the debt now; a clock that was set back gives nothing and takes nothing."""
        return max(0, self.debt - capacity * max(0, now_ms - self.at_ms))

    def owe(self, debt: int, now_ms: int) -> None:
        """Take another debt from now on."""
        self.debt, self.at_ms = max(0, debt), now_ms


@dataclass(slots=True)
class Hold:
    """What one request holds: until when, the tokens that its bucket gave, and those of the month."""

    lease_end_ms: int
    num_bucket_tokens: int
    num_month_tokens: int


class TenantBook:
    """The counts of one tenant."""

    def __init__(self) -> None:
        self.holds: dict[str, Hold] = {}
        # In the month in which a hold was settled last.
        self.month_used = 0
        self._month_start_ms = 0
        self._requests = Bucket()
        self._tokens = Bucket()
        # Until when a settled hold is known; and the same as a heap, the first to be forgotten on top.
        self._settled: dict[str, int] = {}
        self._settled_ends: list[tuple[int, str]] = []

    @property
    def month_held(self) -> int:
        """What requests that run hold of the month."""
        return sum(hold.num_month_tokens for hold in self.holds.values())

    def reserve(
        self, limits: TenantLimits, hold_id: str, num_tokens: int, *, now_ms: int, lease_ms: int
    ) -> Decision | None:
        """Let a request take what it may need, or refuse it and take nothing.

        ``num_tokens`` are those of its prompt and all that its answers may have. None for a hold that is known
        already: its owner went on without waiting for this decision.
        """
        if self._is_settled(hold_id, now_ms) or hold_id in self.holds:
            return None
        self._drop_ended(now_ms)
        waits = self._waits(limits, num_tokens, now_ms)
        refused_by = max(waits, key=lambda limit: waits[limit])
        if waits[refused_by] > 0:
            return Decision(self._standing(limits, now_ms), refused_by, waits[refused_by])
        self.admit(limits, hold_id, num_tokens, now_ms=now_ms, lease_ms=lease_ms)
        return Decision(self._standing(limits, now_ms))

    def admit(self, limits: TenantLimits, hold_id: str, num_tokens: int, *, now_ms: int, lease_ms: int) -> None:
        """Take what a request may need, whatever that leads to: somebody else has let it in."""
        if limits.requests_per_minute is not None:
            debt = self._requests.debt_at(now_ms, limits.requests_per_minute)
            self._requests.owe(debt + MINUTE_MS, now_ms)
        num_bucket_tokens = 0
        if limits.tokens_per_minute is not None:
            num_bucket_tokens = min(num_tokens, limits.tokens_per_minute)
            debt = self._tokens.debt_at(now_ms, limits.tokens_per_minute)
            self._tokens.owe(debt + num_bucket_tokens * MINUTE_MS, now_ms)
        if limits.is_held:
            num_month_tokens = month_tokens_of(limits, num_tokens)
            self.holds[hold_id] = Hold(now_ms + lease_ms, num_bucket_tokens, num_month_tokens)

    def settle(self, limits: TenantLimits, hold_id: str, num_used: int, *, now_ms: int) -> bool:
        """End a hold: what it had not used flows back at once. False for one that was settled before.

        A hold that is not there, because its lease had ended or it was taken elsewhere, is counted all the same.
        """
        if self._is_settled(hold_id, now_ms):
            return False
        hold = self.holds.pop(hold_id, None)
        self._remember_settled(hold_id, now_ms)
        if limits.tokens_per_minute is not None:
            num_taken = 0 if hold is None else hold.num_bucket_tokens
            debt = self._tokens.debt_at(now_ms, limits.tokens_per_minute)
            self._tokens.owe(debt + (num_used - num_taken) * MINUTE_MS, now_ms)
        if limits.tokens_per_month is not None:
            self.month_used = self._month_used_at(now_ms) + num_used
            self._month_start_ms = month_start_ms(now_ms)
        return True

    def renew(self, month_tokens_by_hold: dict[str, int], *, now_ms: int, lease_ms: int) -> int:
        """Give these holds a new lease; those that are gone are put back. Returns how many were."""
        num_gone = 0
        for hold_id, num_month_tokens in month_tokens_by_hold.items():
            if self._is_settled(hold_id, now_ms):
                continue
            if hold_id not in self.holds:
                num_gone += 1
                self.holds[hold_id] = Hold(0, 0, num_month_tokens)
            self.holds[hold_id].lease_end_ms = now_ms + lease_ms
        return num_gone

    def _waits(self, limits: TenantLimits, num_tokens: int, now_ms: int) -> dict[Limit, int]:
        """Return for each limit how long the request would have to wait for it, in ms."""
        waits = dict.fromkeys(Limit, 0)
        if limits.max_parallel_requests is not None and len(self.holds) >= limits.max_parallel_requests:
            waits[Limit.PARALLEL_REQUESTS] = PARALLEL_WAIT_MS
        if limits.requests_per_minute is not None:
            debt = self._requests.debt_at(now_ms, limits.requests_per_minute)
            waits[Limit.REQUESTS_PER_MINUTE] = wait_ms(debt, 1, limits.requests_per_minute)
        if limits.tokens_per_minute is not None:
            debt = self._tokens.debt_at(now_ms, limits.tokens_per_minute)
            # A full bucket lets every request in.
            cost = min(num_tokens, limits.tokens_per_minute)
            waits[Limit.TOKENS_PER_MINUTE] = wait_ms(debt, cost, limits.tokens_per_minute)
        if limits.tokens_per_month is not None:
            waits[Limit.TOKENS_PER_MONTH] = self._month_wait_ms(limits.tokens_per_month, num_tokens, now_ms)
        return waits

    def _month_wait_ms(self, budget: int, num_tokens: int, now_ms: int) -> int:
        used = self._month_used_at(now_ms)
        if used + num_tokens > budget:
            return next_month_start_ms(now_ms) - now_ms
        # It may fit when those that run have ended, with less than they hold.
        return PARALLEL_WAIT_MS if used + self.month_held + num_tokens > budget else 0

    def _standing(self, limits: TenantLimits, now_ms: int) -> Standing:
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return Standing(
            num_held=len(self.holds),
            request_debt=0 if requests is None else self._requests.debt_at(now_ms, requests),
            token_debt=0 if tokens is None else self._tokens.debt_at(now_ms, tokens),
            month_used=0 if limits.tokens_per_month is None else self._month_used_at(now_ms),
            month_held=self.month_held,
        )

    def _drop_ended(self, now_ms: int) -> None:
        """Forget holds whose owner no longer renews them; they are as many as requests at once, at most."""
        ended = [hold_id for hold_id, hold in self.holds.items() if hold.lease_end_ms <= now_ms]
        for hold_id in ended:
            del self.holds[hold_id]

    def _is_settled(self, hold_id: str, now_ms: int) -> bool:
        return self._settled.get(hold_id, now_ms) > now_ms

    def _remember_settled(self, hold_id: str, now_ms: int) -> None:
        while self._settled_ends and self._settled_ends[0][0] <= now_ms:
            end_ms, ended = heappop(self._settled_ends)
            if self._settled.get(ended) == end_ms:
                del self._settled[ended]
        self._settled[hold_id] = now_ms + SETTLED_MS
        heappush(self._settled_ends, (now_ms + SETTLED_MS, hold_id))

    def _month_used_at(self, now_ms: int) -> int:
        return self.month_used if month_start_ms(now_ms) == self._month_start_ms else 0


def month_tokens_of(limits: TenantLimits, num_tokens: int) -> int:
    """Return what a request holds of its tenant's month."""
    return 0 if limits.tokens_per_month is None else num_tokens


def wait_ms(debt: int, cost: int, capacity: int) -> int:
    """Return how long it takes until ``cost`` fits into a bucket beside a debt, in ms, rounded up."""
    return max(0, -(-(debt + (cost - capacity) * MINUTE_MS) // capacity))


def month_start_ms(now_ms: int) -> int:
    """Return when the month began in UTC, in ms since 1970."""
    return _ms(_month_of(now_ms))


def next_month_start_ms(now_ms: int) -> int:
    """Return when the next month begins in UTC, in ms since 1970."""
    month = _month_of(now_ms)
    following = month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
    return _ms(following)


def _month_of(now_ms: int) -> datetime:
    # Whole seconds: a float of milliseconds would round up into the next month.
    return datetime.fromtimestamp(now_ms // 1000, UTC).replace(day=1, hour=0, minute=0, second=0)


def _ms(time: datetime) -> int:
    return int(time.timestamp()) * 1000
