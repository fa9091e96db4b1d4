"""The main line: picks that are counted before they are told, waiting, refusing, giving back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import pytest

from libs.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    HashContractMismatch,
    ModelNotFound,
    NoEngineAvailable,
    OctavoError,
    Overloaded,
)
from services.router.config import RouterConfig
from services.router.engine_events import WatchTarget
from services.router.policy.facts import EngineIdentity, EngineLoad, EngineState, PlacementRequest
from tests.patience import PATIENCE_SECONDS
from tests.unit.router.builders import (
    CONTRACT,
    Gateway,
    RouterUnderTest,
    chain,
    identity,
    load,
    request,
    snapshot,
    target,
)


def burst(router: RouterUnderTest, num_requests: int = 64, seconds: float = 0.005) -> Counter[str]:
    for number in range(num_requests):
        router.clock.now += seconds / num_requests
        router.enqueue(request(f"r{number}", num_prompt_tokens=100))
    return Counter(router.gateway.places.values())


def error_of(router: RouterUnderTest, request_id: str) -> OctavoError:
    return router.gateway.rejections[request_id].error


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param([load()] * 8, id="all have just reported"),
        pytest.param([None] * 8, id="none has reported"),
        pytest.param([None, *[load()] * 7], id="one has not reported"),
        pytest.param([None, *[load(num_pending=300, num_running=4)] * 7], id="one has not reported, others work"),
        pytest.param([load(), *[load(num_pending=200)] * 7], id="one looks best"),
    ],
)
def test_a_burst_spreads_over_equal_engines(loads: list[EngineLoad | None]) -> None:
    """RTR-05."""
    router = RouterUnderTest()
    for number, engine_load in enumerate(loads):
        router.add_engine(identity(f"engine-{number}"), engine_load=engine_load)

    counts = burst(router)

    assert sum(counts.values()) == 64
    assert len(counts) == 8
    assert all(6 <= count <= 10 for count in counts.values()), counts


def test_a_burst_spreads_when_one_report_is_stale() -> None:
    """RTR-05."""
    router = RouterUnderTest()
    router.add_engine(identity("engine-0"), engine_load=load(num_pending=50_000))
    router.clock.now += router.config.load_stale_seconds + 1
    for number in range(1, 8):
        router.add_engine(identity(f"engine-{number}"), engine_load=load())

    counts = burst(router)

    assert all(6 <= counts[f"engine-{number}"] <= 10 for number in range(8)), counts


@pytest.mark.parametrize("seconds", [0.0, 0.5], ids=["at once", "on a slow way"])
def test_a_report_that_cannot_know_the_burst_does_not_hide_it(seconds: float) -> None:
    """RTR-05."""
    router = RouterUnderTest()
    engines = [identity(f"engine-{number}") for number in range(2)]
    for engine in engines:
        router.add_engine(engine, engine_load=load())
    for number in range(4):
        router.enqueue(request(f"a{number}"))

    # engine-0 reports again, from before the burst.
    router.clock.now += seconds
    router.report(engines[0], load())
    for number in range(4):
        router.enqueue(request(f"b{number}"))

    assert Counter(router.gateway.places.values()) == {"engine-0": 4, "engine-1": 4}


def test_a_cached_prefix_wins_over_an_equal_engine_and_loses_to_a_long_queue() -> None:
    router = RouterUnderTest()
    cached, other = identity("cached"), identity("other")
    prompt = chain(60)
    router.add_engine(cached, hashes=prompt, engine_load=load(rate=1000.0))
    router.add_engine(other, engine_load=load(rate=1000.0))

    router.enqueue(request("first", num_prompt_tokens=1000, prefix_hashes=prompt))
    router.report(cached, load(rate=1000.0, num_pending=5000))
    router.enqueue(request("second", num_prompt_tokens=1000, prefix_hashes=prompt))

    assert router.gateway.places == {"first": "cached", "second": "other"}


def test_waits_when_no_engine_is_known_and_is_placed_when_one_comes() -> None:
    router = RouterUnderTest()
    router.enqueue(request("a"))
    router.placement.pump()
    assert router.gateway.answers == []

    router.add_engine(identity())
    router.placement.pump()

    assert router.gateway.places == {"a": "engine-0"}


def test_waits_for_room_in_order_of_priority_and_arrival() -> None:
    router = RouterUnderTest()
    engine = identity(max_num_batched_tokens=100)
    router.add_engine(engine, engine_load=load(num_pending=100))
    router.enqueue(request("low", num_prompt_tokens=60))
    router.enqueue(request("high", num_prompt_tokens=60, priority=1))
    router.enqueue(request("low too", num_prompt_tokens=60))
    router.placement.pump()
    assert router.gateway.answers == []

    router.report(engine, load(num_pending=0))
    router.placement.pump()

    # Two fit: when the third is looked at, 120 tokens of 100 wait.
    assert list(router.gateway.places) == ["high", "low"]


def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    router = RouterUnderTest()
    engine = identity(max_num_batched_tokens=100)
    router.add_engine(engine, engine_load=load(num_pending=100))
    router.enqueue(request("first"))

    router.report(engine, load(num_pending=0))
    router.enqueue(request("second"))
    assert router.gateway.answers == []
    router.placement.pump()

    assert list(router.gateway.places) == ["first"]


def test_requests_for_a_full_model_do_not_hold_up_another_model() -> None:
    router = RouterUnderTest()
    router.add_engine(identity("full", max_num_batched_tokens=100), engine_load=load(num_pending=100))
    router.add_engine(identity("free", model_name="other"), engine_load=load())
    router.enqueue(request("stuck", priority=9))

    router.enqueue(request("served", model_name="other"))

    assert router.gateway.places == {"served": "free"}


def test_a_full_queue_refuses_at_once_with_a_computed_time_to_come_back() -> None:
    router = RouterUnderTest(RouterConfig(max_waiting_requests=2))
    router.add_engine(identity(), engine_load=load(num_pending=100_000, rate=20_000.0))
    router.enqueue(request("a", num_prompt_tokens=4000))
    router.enqueue(request("b", num_prompt_tokens=4000))

    router.enqueue(request("c", num_prompt_tokens=4000))

    error = error_of(router, "c")
    assert isinstance(error, Overloaded)
    assert error.retry_after_seconds == pytest.approx((100_000 + 8000) / 20_000)
    assert list(router.gateway.rejections) == ["c"]


def test_who_waits_longer_than_the_bound_is_told_why() -> None:
    router = RouterUnderTest(RouterConfig(max_wait_seconds=10.0))
    router.add_engine(identity(), engine_load=load(num_pending=100_000, rate=20_000.0))
    router.enqueue(request("no room"))
    router.add_engine(identity("starting", model_name="other"), engine_load=load(state=EngineState.STARTING))
    router.enqueue(request("no engine", model_name="other"))

    router.clock.now += 9.9
    router.placement.pump()
    assert router.gateway.answers == []
    router.clock.now += 0.1
    router.placement.pump()

    no_room, no_engine = error_of(router, "no room"), error_of(router, "no engine")
    assert isinstance(no_room, Overloaded)
    assert no_room.retry_after_seconds == pytest.approx(100_000 / 20_000)
    assert isinstance(no_engine, NoEngineAvailable)
    assert no_engine.retry_after_seconds == router.config.no_engine_retry_seconds


def test_a_deadline_of_its_own_ends_the_wait_earlier() -> None:
    router = RouterUnderTest(RouterConfig(max_wait_seconds=10.0))
    router.enqueue(request("a", remaining_seconds=2.0))
    router.enqueue(request("over", remaining_seconds=0.0))

    router.clock.now += 2.0
    router.placement.pump()

    assert isinstance(error_of(router, "a"), DeadlineExceeded)
    assert isinstance(error_of(router, "over"), DeadlineExceeded)


async def test_the_loop_wakes_for_an_expiry_without_any_event() -> None:
    router = RouterUnderTest(RouterConfig(max_wait_seconds=0.02), clock=asyncio.get_running_loop().time)
    running = asyncio.create_task(router.placement.run())
    await asyncio.sleep(0)

    router.enqueue(request("a"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not router.gateway.answers:
            await asyncio.sleep(0.005)

    running.cancel()
    assert isinstance(error_of(router, "a"), NoEngineAvailable)


def test_an_unknown_model_is_refused_once_any_engine_is_known() -> None:
    router = RouterUnderTest()
    router.enqueue(request("early", model_name="nobody's"))
    assert router.gateway.answers == []

    router.directory.set_lease(identity(is_loaded=False))
    router.placement.pump()
    router.enqueue(request("late", model_name="nobody's"))

    assert isinstance(error_of(router, "early"), ModelNotFound)
    assert isinstance(error_of(router, "late"), ModelNotFound)


def test_an_unknown_model_waits_while_a_configured_engine_has_not_said_what_it_serves() -> None:
    router = RouterUnderTest()
    router.directory.expect(WatchTarget("a:1", None))
    router.add_engine(identity())

    router.enqueue(request("a", model_name="other"))

    assert router.gateway.answers == []


def test_another_hash_contract_is_refused_not_silently_missed() -> None:
    router = RouterUnderTest()
    router.add_engine(identity(), engine_load=load())

    router.enqueue(request("a", hash_contract=dataclasses.replace(CONTRACT, tokenizer_digest=b"x" * 32)))

    assert isinstance(error_of(router, "a"), HashContractMismatch)


def test_a_prompt_that_no_engine_holds_is_refused_with_both_numbers() -> None:
    router = RouterUnderTest()
    router.add_engine(identity(), engine_load=load())

    router.enqueue(request("a", num_prompt_tokens=9000))

    error = error_of(router, "a")
    assert isinstance(error, ContextLengthExceeded)
    assert "9000" in error.message
    assert "8192" in error.message


OTHER_CONTRACT = dataclasses.replace(CONTRACT, block_size=32)


@pytest.mark.parametrize(
    ("left", "asked", "is_forgotten"),
    [
        pytest.param(identity("left", model_name="other"), request("a"), False, id="its model"),
        pytest.param(identity("left", model_name="other"), request("a"), True, id="its model, no lease"),
        pytest.param(identity("left", hash_contract=OTHER_CONTRACT), request("a"), False, id="its block size"),
        pytest.param(
            identity("left", max_model_len=512), request("a", num_prompt_tokens=600), False, id="its context"
        ),
    ],
)
def test_while_the_one_engine_that_could_serve_it_is_away_a_request_waits(
    left: EngineIdentity, asked: PlacementRequest, is_forgotten: bool
) -> None:
    """An engine that is started anew must not make clients think for seconds that they ask in a wrong way."""
    lost = identity("lost")
    router = RouterUnderTest()
    router.add_engine(lost, engine_load=load())
    router.add_engine(left, engine_load=load())
    router.directory.lose(target("lost"))
    if is_forgotten:
        router.directory.end_lease(lost.engine_id)

    router.enqueue(asked)
    assert router.gateway.answers == []
    router.add_engine(dataclasses.replace(lost, incarnation=2), engine_load=load())
    router.placement.pump()

    assert router.gateway.places == {"a": "lost"}


def test_while_an_engine_loads_its_hash_contract_is_not_known_and_a_request_waits() -> None:
    router = RouterUnderTest()
    router.add_engine(identity("other", hash_contract=OTHER_CONTRACT), engine_load=load())
    router.directory.set_lease(
        identity("loads", hash_contract=dataclasses.replace(CONTRACT, tokenizer_digest=b""), is_loaded=False)
    )

    router.enqueue(request("a"))

    assert router.gateway.answers == []


def test_a_tenant_that_floods_the_queue_does_not_make_another_wait_for_all_of_it() -> None:
    router = RouterUnderTest()
    engine = identity(max_num_batched_tokens=100, max_num_seqs=4)
    router.add_engine(engine, engine_load=load(num_pending=100))
    for number in range(40):
        router.enqueue(request(f"flood-{number}", tenant_id="flood", num_prompt_tokens=60))
    router.enqueue(request("small", tenant_id="small", num_prompt_tokens=60))

    router.report(engine, load(num_pending=0))
    router.placement.pump()

    assert list(router.gateway.places) == ["flood-0", "small"]


def test_an_excluded_engine_is_not_used() -> None:
    router = RouterUnderTest()
    router.add_engine(identity("engine-0"))
    router.add_engine(identity("engine-1"), engine_load=load(num_pending=50_000))

    router.enqueue(request("a", excluded=["engine-0"]))
    router.enqueue(request("b", excluded=["engine-0", "engine-1"]))

    assert router.gateway.places == {"a": "engine-1"}
    assert router.gateway.rejections == {}


def test_counts_from_the_pick_until_start_and_finish() -> None:
    """RTR-05."""
    router = RouterUnderTest()
    router.add_engine(identity())
    router.enqueue(request("a", num_prompt_tokens=100))
    (facts,) = router.directory.facts(router.clock.now)
    assert (facts.num_unseen_tokens, facts.num_placed_requests) == (100, 1)

    router.placement.start(router.gateway_id, "a")
    (facts,) = router.directory.facts(router.clock.now)
    assert (facts.num_unseen_tokens, facts.num_placed_requests) == (0, 1)

    router.placement.finish(router.gateway_id, "a")
    router.placement.finish(router.gateway_id, "a")
    assert router.num_placed("engine-0") == 0


def test_a_request_cancelled_while_it_waits_is_not_answered() -> None:
    router = RouterUnderTest()
    router.enqueue(request("a"))

    router.placement.cancel(router.gateway_id, "a")
    router.add_engine(identity())
    router.placement.pump()

    assert router.gateway.answers == []
    assert router.num_placed("engine-0") == 0


def test_a_request_cancelled_after_its_pick_gives_the_place_back() -> None:
    router = RouterUnderTest()
    router.add_engine(identity())
    router.enqueue(request("a"))

    router.placement.cancel(router.gateway_id, "a")

    assert router.num_placed("engine-0") == 0


def test_a_broken_gateway_stream_releases_its_requests_only() -> None:
    router = RouterUnderTest()
    engine = identity(max_num_batched_tokens=100)
    router.add_engine(engine, engine_load=load())
    other = Gateway()
    other_id = router.placement.open_gateway(other)
    router.enqueue(request("placed", num_prompt_tokens=100))
    router.enqueue(request("waiting"))
    router.placement.enqueue(other_id, request("other's"))

    router.placement.close_gateway(router.gateway_id)
    router.placement.pump()

    assert router.num_placed("engine-0") == 1
    assert list(router.gateway.places) == ["placed"]
    assert list(other.places) == ["other's"]


def test_the_same_id_twice_on_a_stream_is_refused_and_the_first_stays() -> None:
    router = RouterUnderTest()
    router.enqueue(request("a"))

    router.enqueue(request("a"))
    router.add_engine(identity())
    router.placement.pump()

    assert isinstance(error_of(router, "a"), DuplicateRequest)
    assert router.gateway.places == {"a": "engine-0"}


def test_two_gateways_may_use_the_same_id() -> None:
    router = RouterUnderTest()
    router.add_engine(identity())
    other = Gateway()
    other_id = router.placement.open_gateway(other)

    router.enqueue(request("a"))
    router.placement.enqueue(other_id, request("a"))
    router.placement.finish(other_id, "a")

    assert router.num_placed("engine-0") == 1


def test_draining_rejects_who_waits_and_who_comes() -> None:
    router = RouterUnderTest()
    router.enqueue(request("waits"))

    router.placement.drain()
    router.enqueue(request("comes"))

    assert isinstance(error_of(router, "waits"), Draining)
    assert isinstance(error_of(router, "comes"), Draining)


def test_a_lost_engine_gets_nothing_more() -> None:
    router = RouterUnderTest()
    router.add_engine(identity("engine-0"))
    router.add_engine(identity("engine-1"), engine_load=load(num_pending=50_000))

    router.directory.lose(target("engine-0"))
    router.enqueue(request("a"))

    assert router.gateway.places == {"a": "engine-1"}


def test_seats_are_counted_so_that_short_prompts_do_not_queue_at_the_engine() -> None:
    router = RouterUnderTest()
    router.add_engine(identity(max_num_seqs=4), engine_load=load())

    for number in range(8):
        router.enqueue(request(f"r{number}", num_prompt_tokens=1))

    assert len(router.gateway.places) == 5


def test_a_gateway_cannot_hold_more_requests_than_the_bound() -> None:
    router = RouterUnderTest(RouterConfig(max_requests_per_gateway=2))
    router.add_engine(identity())
    for name in "abc":
        router.enqueue(request(name))

    assert list(router.gateway.places) == ["a", "b"]
    assert isinstance(error_of(router, "c"), Overloaded)


def test_a_new_incarnation_takes_requests_and_starts_uncounted() -> None:
    router = RouterUnderTest()
    router.add_engine(identity())
    router.enqueue(request("a"))

    router.directory.apply(target(), snapshot(identity(incarnation=2)), router.clock.now)
    router.enqueue(request("b"))
    router.placement.finish(router.gateway_id, "a")

    assert router.num_placed("engine-0") == 1
