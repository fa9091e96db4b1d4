"""How clients are told of their tenant's limits: headers, and the sentences of refusals."""

from __future__ import annotations

import pytest

from libs.errors import BudgetExhausted, RateLimited
from services.gateway.http_errors import http_error
from services.gateway.limits.limiter import Ask
from services.gateway.limits.refusals import refusal_of
from services.gateway.limits.report import LimitReport
from services.gateway.limits.rules import MINUTE_MS, PARALLEL_WAIT_MS, Decision, Standing
from services.gateway.tenant_limits import Limit, TenantLimits

LIMITS = TenantLimits(
    max_parallel_requests=3, requests_per_minute=60, tokens_per_minute=1_000, tokens_per_month=5_000
)
ASK = Ask(tenant_id="acme", limits=LIMITS, request_id="r-1", num_tokens=700)


def test_without_limits_a_minute_there_are_no_headers() -> None:
    report = LimitReport()
    assert report.headers == {}

    report.tell(TenantLimits(max_parallel_requests=1, tokens_per_month=5), Standing(num_held=1))

    assert report.headers == {}


@pytest.mark.parametrize(
    ("request_debt", "remaining", "reset"),
    [
        (0, "60", "0s"),
        (1, "59", "1ms"),
        (MINUTE_MS, "59", "1s"),
        (90_000, "58", "1.5s"),
        (60 * MINUTE_MS, "0", "1m0s"),
    ],
)
def test_headers_round_to_the_side_on_which_a_request_is_served(
    request_debt: int, remaining: str, reset: str
) -> None:
    report = LimitReport()

    report.tell(TenantLimits(requests_per_minute=60), Standing(request_debt=request_debt))

    assert report.headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": remaining,
        "x-ratelimit-reset-requests": reset,
    }


def test_a_bucket_in_debt_has_nothing_and_says_how_long() -> None:
    report = LimitReport()

    report.tell(TenantLimits(tokens_per_minute=1_000), Standing(token_debt=1_250 * MINUTE_MS))

    assert report.headers["x-ratelimit-remaining-tokens"] == "0"
    assert report.headers["x-ratelimit-reset-tokens"] == "1m15s"


def test_who_may_be_served_is_not_refused() -> None:
    assert refusal_of(ASK, Decision(Standing())) is None


@pytest.mark.parametrize(
    ("limit", "wait_ms", "words", "retry_after"),
    [
        (Limit.PARALLEL_REQUESTS, PARALLEL_WAIT_MS, ["3 at once", "3 requests of it run"], "1"),
        (Limit.REQUESTS_PER_MINUTE, 999, ["60 requests a minute", "try again in 0.999 s"], "1"),
        (Limit.TOKENS_PER_MINUTE, 42_001, ["1000 tokens a minute", "700 tokens", "lower the output limit"], "43"),
        (Limit.TOKENS_PER_MONTH, PARALLEL_WAIT_MS, ["4000 are used and 600 held", "one of those has ended"], "1"),
        (Limit.TOKENS_PER_MONTH, 180_000_000, ["5000 tokens a month", "begins in 2.1 days"], "180000"),
    ],
)
def test_a_refusal_names_the_limit_its_value_and_what_to_do(
    limit: Limit, wait_ms: int, words: list[str], retry_after: str
) -> None:
    standing = Standing(num_held=3, month_used=4_000, month_held=600)

    refusal = refusal_of(ASK, Decision(standing, limit, wait_ms))

    assert type(refusal) is (BudgetExhausted if limit is Limit.TOKENS_PER_MONTH else RateLimited)
    answer = http_error(refusal)
    assert all(word in refusal.message for word in ("acme", limit.value, *words)), refusal.message
    assert (answer.status, answer.headers["Retry-After"]) == (429, retry_after)
