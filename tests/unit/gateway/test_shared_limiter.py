"""A gateway's conversation with Redis about limits, and its own counts while there is none."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import pytest

from libs.obs.metrics import GatewayMetrics
from services.gateway.limits.limiter import Ask, Limiter, Reservation
from services.gateway.limits.own_counts import LocalLimiter, OwnCounts
from services.gateway.limits.redis_counts import Command, Reply
from services.gateway.limits.rules import MINUTE_MS
from services.gateway.limits.shared_limiter import SharedLimiter, SharingSettings
from services.gateway.tenant_limits import Limit, TenantLimits
from tests.fakes.fake_limit_counts import FakeLimitCounts
from tests.patience import PATIENCE_SECONDS

ONE: Final = TenantLimits(max_parallel_requests=1)
BUDGET: Final = TenantLimits(tokens_per_month=1_000)
PROMPT: Final = SharingSettings(
    owner="g:1", lease_seconds=0.3, timeout_seconds=30.0, retry_seconds=0.01, second_look_seconds=0.01
)
# A call that nobody waits for.
HASTY: Final = SharingSettings(owner="g:1", lease_seconds=30.0, timeout_seconds=0.01, retry_seconds=0.01)


@asynccontextmanager
async def running(
    redis: FakeLimitCounts, metrics: GatewayMetrics, settings: SharingSettings = PROMPT
) -> AsyncIterator[SharedLimiter]:
    limiter = SharedLimiter(redis, OwnCounts(lambda: redis.now_ms), settings, metrics)
    task = asyncio.create_task(limiter.run())
    try:
        yield limiter
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def redis() -> FakeLimitCounts:
    return FakeLimitCounts()


_NUMBERS = itertools.count()


def ask_of(limits: TenantLimits, num_tokens: int = 100, tenant_id: str = "acme") -> Ask:
    number = next(_NUMBERS)
    return Ask(tenant_id=tenant_id, limits=limits, request_id=f"r-{number}", num_tokens=num_tokens)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def count(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"octavo_gateway_limit_{name}_total", labels) or 0.0


def is_served(reservation: Reservation) -> bool:
    return reservation.decision.refused_by is None


async def test_a_place_that_was_given_back_is_there_for_the_next_who_asks(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    async with running(redis, metrics) as limiter:
        for _ in range(50):
            reservation = await limiter.reserve(ask_of(ONE))
            assert is_served(reservation)
            # No waiting in between: the next request may be on its way already.
            reservation.hold.close(5)

    assert count(metrics, "local_decisions") == 0


async def test_two_gateways_share_one_limit(redis: FakeLimitCounts, metrics: GatewayMetrics) -> None:
    other_settings = SharingSettings(owner="g:2", lease_seconds=30.0, timeout_seconds=30.0)
    async with running(redis, metrics) as one, running(redis, metrics, other_settings) as other:
        held = await one.reserve(ask_of(ONE))
        refused = await other.reserve(ask_of(ONE))
        held.hold.close(0)
        await one.flush(PATIENCE_SECONDS)

        assert refused.decision.refused_by is Limit.PARALLEL_REQUESTS
        assert is_served(await other.reserve(ask_of(ONE)))
        assert next(iter(redis.books["acme"].holds)).startswith("g:2/")
    assert count(metrics, "refusals", limit="max_parallel_requests") == 1


@pytest.mark.parametrize("limits", [ONE, TenantLimits(tokens_per_minute=100), TenantLimits(tokens_per_month=100)])
async def test_what_is_on_its_way_back_from_another_gateway_is_waited_for(
    redis: FakeLimitCounts, metrics: GatewayMetrics, limits: TenantLimits
) -> None:
    patient = replace(PROMPT, owner="g:2", second_look_seconds=0.5)
    async with running(redis, metrics) as one, running(redis, metrics, patient) as other:
        held = await one.reserve(ask_of(limits))
        num_runs = redis.num_runs
        asking = asyncio.create_task(other.reserve(ask_of(limits)))
        await until(lambda: redis.num_runs > num_runs)

        held.hold.close(0)

        assert is_served(await asking)
    assert count(metrics, "refusals", limit=next(iter(limits.by_limit))) == 0


async def test_a_refusal_for_what_nobody_can_give_back_comes_at_once(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    never = replace(PROMPT, second_look_seconds=2 * PATIENCE_SECONDS)
    async with running(redis, metrics, never) as limiter, asyncio.timeout(PATIENCE_SECONDS):
        for limits in (TenantLimits(requests_per_minute=1), TenantLimits(tokens_per_month=100)):
            (await limiter.reserve(ask_of(limits))).hold.close(100)
            assert not is_served(await limiter.reserve(ask_of(limits)))


async def test_many_ask_in_one_exchange(redis: FakeLimitCounts, metrics: GatewayMetrics) -> None:
    limits = TenantLimits(max_parallel_requests=40)
    async with running(redis, metrics) as limiter:
        reservations = await asyncio.gather(*(limiter.reserve(ask_of(limits)) for _ in range(50)))

    assert sum(map(is_served, reservations)) == 40
    # The ten that were refused have asked again, together too.
    assert redis.num_runs <= 5


async def test_without_redis_a_gateway_goes_on_with_what_it_has_counted_itself(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    limits = TenantLimits(max_parallel_requests=2)
    async with running(redis, metrics) as limiter:
        held = await limiter.reserve(ask_of(limits))
        redis.is_away = True

        alone = [await limiter.reserve(ask_of(limits)) for _ in range(2)]
        held.hold.close(10)
        again = await limiter.reserve(ask_of(limits))

        # What was held before counts too.
        assert [is_served(reservation) for reservation in (*alone, again)] == [True, False, True]
        assert count(metrics, "store_losses") == 1
        assert count(metrics, "local_decisions") == 3


async def test_when_redis_is_back_it_hears_of_everything_that_happened_without_it(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    limits = TenantLimits(max_parallel_requests=3, tokens_per_month=1_000)
    async with running(redis, metrics) as limiter:
        before = await limiter.reserve(ask_of(limits))
        redis.is_away = True
        during = [await limiter.reserve(ask_of(limits)) for _ in range(2)]
        during[0].hold.close(30)
        before.hold.close(50)
        # It comes back empty.
        redis.books.clear()
        redis.is_away = False

        await until(lambda: redis.books["acme"].month_used == 80)
        await until(lambda: len(redis.books["acme"].holds) == 1)
        num_local = count(metrics, "local_decisions")
        others = [await limiter.reserve(ask_of(limits)) for _ in range(3)]

        assert [is_served(reservation) for reservation in others] == [True, True, False]
        assert count(metrics, "local_decisions") == num_local
        assert count(metrics, "holds_restored") == 1
        during[1].hold.close(5)
        await limiter.flush(PATIENCE_SECONDS)
        assert redis.books["acme"].month_used == 85


async def test_what_was_used_without_redis_is_no_debt_when_it_has_flowed_back(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    # 100 tokens flow back in less than 1 ms.
    limits = TenantLimits(tokens_per_minute=10**7)
    async with running(redis, metrics) as limiter:
        redis.is_away = True
        for _ in range(20):
            (await limiter.reserve(ask_of(limits))).hold.close(100)
        await asyncio.sleep(0.01)
        redis.is_away = False
        await limiter.flush(PATIENCE_SECONDS)

        standing = (await limiter.reserve(ask_of(limits))).decision.standing

    assert standing.token_debt == 100 * MINUTE_MS


async def test_holds_that_redis_has_lost_are_put_back_by_the_next_renewal(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    async with running(redis, metrics) as limiter:
        await limiter.reserve(ask_of(ONE))
        redis.books.clear()

        await until(lambda: len(redis.books["acme"].holds) == 1)

        assert not is_served(await limiter.reserve(ask_of(ONE)))
        assert count(metrics, "holds_restored") == 1
        assert count(metrics, "store_losses") == 0


async def test_leases_are_renewed_while_a_request_runs(redis: FakeLimitCounts, metrics: GatewayMetrics) -> None:
    async with running(redis, metrics) as limiter:
        await limiter.reserve(ask_of(ONE))
        (hold,) = redis.books["acme"].holds.values()
        first_end_ms = hold.lease_end_ms
        redis.now_ms += 299

        await until(lambda: hold.lease_end_ms == first_end_ms + 299)

        assert count(metrics, "holds_restored") == 0


@dataclass(slots=True)
class _BusyCounts(FakeLimitCounts):
    """Lets something else happen during each exchange."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def run(self, commands: Sequence[Command]) -> list[Reply]:
        replies = await FakeLimitCounts.run(self, commands)
        if commands and self.meanwhile is not None:
            await self.meanwhile()
        return replies


def come_all_the_time(redis: _BusyCounts, limiter: SharedLimiter) -> None:
    """Let a request come during each exchange, so that there always is something to say."""
    tasks: set[asyncio.Task[None]] = set()

    async def come_and_go() -> None:
        (await limiter.reserve(ask_of(ONE, tenant_id="busy"))).hold.close(1)

    async def begin() -> None:
        tasks.add(task := asyncio.create_task(come_and_go()))
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(0)

    redis.meanwhile = begin


async def test_leases_are_renewed_while_there_is_always_something_to_say(metrics: GatewayMetrics) -> None:
    redis = _BusyCounts()
    async with running(redis, metrics) as limiter:
        come_all_the_time(redis, limiter)
        await limiter.reserve(ask_of(ONE))
        (hold,) = redis.books["acme"].holds.values()
        first_end_ms = hold.lease_end_ms
        redis.now_ms += 299

        await until(lambda: hold.lease_end_ms == first_end_ms + 299)
        (renewed,) = redis.books["acme"].holds.values()

    assert renewed is hold


async def test_redis_decides_again_though_there_is_always_something_to_say(metrics: GatewayMetrics) -> None:
    redis = _BusyCounts()
    async with running(redis, metrics) as limiter:
        redis.is_away = True
        (await limiter.reserve(ask_of(ONE))).hold.close(1)
        come_all_the_time(redis, limiter)
        redis.is_away = False

        is_local = True
        async with asyncio.timeout(PATIENCE_SECONDS):
            while is_local:
                await asyncio.sleep(0.005)
                num_local = count(metrics, "local_decisions")
                reservation = await limiter.reserve(ask_of(ONE))
                reservation.hold.close(1)
                is_local = count(metrics, "local_decisions") > num_local

    assert is_served(reservation)


async def test_who_is_let_in_while_redis_comes_back_is_known_before_it_decides(metrics: GatewayMetrics) -> None:
    redis, alone = _BusyCounts(), list[Reservation]()
    async with running(redis, metrics, replace(PROMPT, lease_seconds=300.0)) as limiter:
        await limiter.reserve(ask_of(ONE, tenant_id="other"))
        redis.is_away = True
        (await limiter.reserve(ask_of(ONE))).hold.close(1)

        async def let_in() -> None:
            redis.meanwhile = None
            alone.append(await limiter.reserve(ask_of(ONE)))

        redis.meanwhile, redis.is_away = let_in, False
        await until(lambda: len(alone) == 1)
        num_local = count(metrics, "local_decisions")
        await until(lambda: len(redis.books["acme"].holds) == 1)

        assert is_served(alone[0])
        assert not is_served(await limiter.reserve(ask_of(ONE)))
        assert count(metrics, "local_decisions") == num_local


@pytest.mark.parametrize("comes_before_the_return", [True, False])
async def test_a_reservation_that_redis_makes_too_late_leaves_nothing(
    redis: FakeLimitCounts, metrics: GatewayMetrics, comes_before_the_return: bool
) -> None:
    async with running(redis, metrics) as limiter:
        held, alone = await limiter.reserve(ask_of(ONE)), ask_of(ONE)
        # Redis would let in what the gateway alone does not.
        redis.books.clear()
        redis.is_late = True
        refused = await limiter.reserve(ask_of(ONE))
        held.hold.close(5)
        served = await limiter.reserve(alone)
        if comes_before_the_return:
            redis.catch_up()
        redis.is_late = False
        await until(lambda: f"g:1/{alone.request_id}" in redis.books["acme"].holds)
        await limiter.flush(PATIENCE_SECONDS)
        redis.catch_up()

        assert [is_served(refused), is_served(served)] == [False, True]
        assert list(redis.books["acme"].holds) == [f"g:1/{alone.request_id}"]


async def test_what_redis_counts_without_an_answer_is_counted_once(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    async with running(redis, metrics) as limiter:
        reservation = await limiter.reserve(ask_of(BUDGET))
        redis.is_late = True
        reservation.hold.close(70)
        reservation.hold.close(70)
        await until(lambda: count(metrics, "store_losses") == 1)
        redis.catch_up()
        redis.is_late = False
        await limiter.flush(PATIENCE_SECONDS)
        redis.catch_up()

        assert redis.books["acme"].month_used == 70


async def test_a_client_that_leaves_while_redis_decides_holds_nothing(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    async with running(redis, metrics) as limiter:
        redis.may_answer = asyncio.Event()
        asking = asyncio.create_task(limiter.reserve(ask_of(ONE)))
        await until(lambda: bool(redis.books["acme"].holds))

        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        redis.may_answer.set()
        redis.may_answer = None

        assert is_served(await limiter.reserve(ask_of(ONE)))


async def test_nobody_waits_longer_than_a_call_may_take_and_the_late_answer_is_given_back(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    async with running(redis, metrics, HASTY) as limiter:
        redis.may_answer = asyncio.Event()

        reservation = await limiter.reserve(ask_of(ONE))
        refused = await limiter.reserve(ask_of(ONE))
        reservation.hold.close(5)
        redis.may_answer.set()
        redis.may_answer = None
        await limiter.flush(PATIENCE_SECONDS)

        assert is_served(reservation)
        assert not is_served(refused)
        assert redis.books["acme"].holds == {}


async def test_what_waits_for_redis_is_bounded_and_what_is_dropped_is_counted(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    async with running(redis, metrics, replace(PROMPT, max_settlements=3)) as limiter:
        redis.is_away = True
        for _ in range(5):
            (await limiter.reserve(ask_of(BUDGET))).hold.close(10)

        await until(lambda: count(metrics, "settlements_dropped") == 2)
        await limiter.flush(0.01)

        # Nobody will hear of what is left at the end.
        assert count(metrics, "settlements_dropped") == 5


async def test_what_may_have_been_counted_long_ago_is_not_counted_again(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    async with running(redis, metrics, replace(PROMPT, max_doubt_seconds=0.0)) as limiter:
        reservation = await limiter.reserve(ask_of(BUDGET))
        redis.is_late = True
        reservation.hold.close(70)
        await until(lambda: count(metrics, "store_losses") == 1)
        (await limiter.reserve(ask_of(BUDGET))).hold.close(7)

        redis.is_late = False
        await until(lambda: redis.books["acme"].month_used == 7)

        assert count(metrics, "settlements_dropped") == 1


async def test_a_tenant_far_below_its_limits_is_never_refused_while_redis_flaps(
    redis: FakeLimitCounts, metrics: GatewayMetrics
) -> None:
    limits = TenantLimits(max_parallel_requests=100, requests_per_minute=10_000, tokens_per_minute=10**7)
    async with running(redis, metrics) as limiter:
        served = []
        for index in range(200):
            redis.is_away, redis.is_late = index % 7 in (1, 2), index % 7 == 4
            reservation = await limiter.reserve(ask_of(limits))
            served.append(is_served(reservation))
            reservation.hold.close(10)
            await asyncio.sleep(0.002)
        redis.is_away = redis.is_late = False
        redis.catch_up()
        await limiter.flush(PATIENCE_SECONDS)

        assert all(served)
        assert redis.books["acme"].holds == {}
        assert count(metrics, "store_losses") > 1


async def test_requests_that_hold_nothing_leave_nothing(redis: FakeLimitCounts, metrics: GatewayMetrics) -> None:
    limits = TenantLimits(requests_per_minute=2)
    async with running(redis, metrics) as limiter:
        served = [is_served(await limiter.reserve(ask_of(limits))) for _ in range(3)]

    assert served == [True, True, False]
    assert redis.books["acme"].holds == {}


# --- Without Redis.


async def test_own_counts_limit_each_tenant_by_itself(metrics: GatewayMetrics) -> None:
    limiter: Limiter = LocalLimiter(OwnCounts(lambda: 0), metrics)

    first = await limiter.reserve(ask_of(ONE))
    refused = await limiter.reserve(ask_of(ONE))
    other = await limiter.reserve(ask_of(ONE, tenant_id="globex"))
    first.hold.close(1)
    first.hold.close(1)

    assert not is_served(refused)
    assert is_served(other)
    assert is_served(await limiter.reserve(ask_of(ONE)))
    assert count(metrics, "refusals", limit="max_parallel_requests") == 1
