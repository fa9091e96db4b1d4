"""How a refusal is told: which limit, its value, and what to do. Owns the sentences."""

from __future__ import annotations

from typing import assert_never

from libs.errors import BudgetExhausted, OctavoError, RateLimited
from services.gateway.limits.limiter import Ask
from services.gateway.limits.rules import PARALLEL_WAIT_MS, Decision
from services.gateway.tenant_limits import Limit

_MS_PER_SECOND = 1_000


def refusal_of(ask: Ask, decision: Decision) -> OctavoError | None:
    """Return what a request is refused with; None for one that may be served."""
    limit = decision.refused_by
    if limit is None:
        return None
    wait_seconds = decision.wait_ms / _MS_PER_SECOND
    message = _message(ask, decision, limit, ask.limits.by_limit[limit])
    error_class = BudgetExhausted if limit is Limit.TOKENS_PER_MONTH else RateLimited
    return error_class(message, retry_after_seconds=wait_seconds)


def _message(ask: Ask, decision: Decision, limit: Limit, value: int) -> str:
    standing, wait_seconds = decision.standing, decision.wait_ms / _MS_PER_SECOND
    tenant, tokens = ask.tenant_id, f"the {ask.num_tokens} tokens that this request may need (prompt and output)"
    match limit:
        case Limit.PARALLEL_REQUESTS:
            return (
                f"The limit of tenant {tenant} is {value} at once ({limit}), and {standing.num_held} "
                "requests of it run; send this one again when one of them has ended."
            )
        case Limit.REQUESTS_PER_MINUTE:
            return (
                f"The limit of tenant {tenant} is {value} requests a minute ({limit}), and it is reached; "
                f"try again in {wait_seconds:g} s."
            )
        case Limit.TOKENS_PER_MINUTE:
            return (
                f"The limit of tenant {tenant} is {value} tokens a minute ({limit}), which now leaves no room for "
                f"{tokens}; try again in {wait_seconds:g} s, or lower the output limit."
            )
        case Limit.TOKENS_PER_MONTH:
            return (
                f"The budget of tenant {tenant} is {value} tokens a month ({limit}). "
                f"{standing.month_used} are used and {standing.month_held} held by requests that run, which leaves "
                f"no room for {tokens}; lower the output limit, or {_when_again(decision)}."
            )
        case _:
            assert_never(limit)


def _when_again(decision: Decision) -> str:
    if decision.wait_ms == PARALLEL_WAIT_MS:
        return "send it again when one of those has ended"
    return "ask the operator for a larger budget; the next month begins in " + _rough(decision.wait_ms)


def _rough(wait_ms: int) -> str:
    hours = wait_ms / (_MS_PER_SECOND * 60 * 60)
    return f"{hours / 24:.1f} days" if hours >= 24 else f"{hours:.1f} hours"
