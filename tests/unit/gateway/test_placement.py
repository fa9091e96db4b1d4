"""Places: the router's word while there is one, the gateway's own pick when there is none."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from libs.errors import Draining, ModelNotFound, NoEngineAvailable, Overloaded
from libs.kv import HashContract, PrefixHash
from libs.obs.metrics import GatewayMetrics
from libs.protogen.engine.v1 import engine_pb2
from services.gateway.placement import Place, Placements, RouterPlacements
from tests.fakes.fake_generation_engine import FakeGenerationEngine
from tests.fakes.fake_router import FakeRouter
from tests.patience import PATIENCE_SECONDS
from tests.unit.gateway.conftest import StartEngine, ask_of, directory_of, own_placements

StartRouter = Callable[..., Awaitable[tuple[FakeRouter, Placements]]]


@pytest.fixture
async def start_router(metrics: GatewayMetrics) -> AsyncIterator[StartRouter]:
    """Start a fake router and placements that use it."""
    async with AsyncExitStack() as stack:

        async def start(*engines: FakeGenerationEngine) -> tuple[FakeRouter, Placements]:
            router = FakeRouter(list(engines))
            await router.start()
            stack.push_async_callback(router.stop)
            by_router = RouterPlacements(router.address, timeout_seconds=0.8, max_requests=16)
            running = asyncio.create_task(by_router.run())
            directory = await directory_of(*engines)
            stack.push_async_callback(directory.close)

            async def stop_running() -> None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

            stack.push_async_callback(stop_running)
            placements = Placements(
                router=by_router, directory=directory, metrics=metrics, random_source=random.Random(0)
            )
            return router, placements

        yield start


def deadline(seconds: float = 10.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def own_count(metrics: GatewayMetrics) -> float:
    value = metrics.registry.get_sample_value("octavo_gateway_own_placements_total")
    assert value is not None
    return value


async def test_the_router_decides_and_hears_of_start_and_end(
    start_engine: StartEngine, start_router: StartRouter, metrics: GatewayMetrics
) -> None:
    engine = await start_engine()
    router, placements = await start_router(engine)
    ask = dataclasses.replace(
        ask_of(engine), prefix_hashes=[PrefixHash(bytes(32))], excluded_engine_ids=("elsewhere",)
    )

    place = await placements.place(ask, deadline=deadline())
    place.mark_started()
    place.release()
    place.release()
    await router.wait_until(lambda: bool(router.finished_ids))

    assert (place.choice.engine_id, place.choice.address) == ("fake-0", engine.address)
    enqueue = router.enqueues[0]
    assert (enqueue.num_prompt_tokens, enqueue.max_output_tokens) == (3, 16)
    assert list(enqueue.prefix_hashes) == [bytes(32)]
    assert enqueue.hash_contract.tokenizer_digest == engine.tokenizer_digest
    assert list(enqueue.excluded_engine_ids) == ["elsewhere"]
    assert router.started_ids == ["r-1"]
    assert router.finished_ids == ["r-1"]
    assert own_count(metrics) == 0


async def test_a_refusal_is_passed_on_and_not_overruled(
    start_engine: StartEngine, start_router: StartRouter, metrics: GatewayMetrics
) -> None:
    engine = await start_engine()
    router, placements = await start_router(engine)
    router.refusal = Overloaded("full", retry_after_seconds=7.0)

    with pytest.raises(Overloaded) as caught:
        await placements.place(ask_of(engine), deadline=deadline())

    assert caught.value.retry_after_seconds == 7.0
    assert own_count(metrics) == 0


async def test_a_router_that_queues_and_lives_is_waited_for(
    start_engine: StartEngine, start_router: StartRouter, metrics: GatewayMetrics
) -> None:
    engine = await start_engine()
    router, placements = await start_router(engine)
    router.holds = True

    waiting = asyncio.create_task(placements.place(ask_of(engine), deadline=deadline()))
    await router.wait_until(lambda: bool(router.enqueues))
    await asyncio.sleep(2.0)

    assert not waiting.done()
    waiting.cancel()
    await router.wait_until(lambda: router.cancelled_ids == ["r-1"])
    assert own_count(metrics) == 0


async def test_without_an_answering_router_the_gateway_picks(
    start_engine: StartEngine, start_router: StartRouter, metrics: GatewayMetrics
) -> None:
    engine = await start_engine()
    router, placements = await start_router(engine)
    await router.stop()

    places = [await placements.place(ask_of(engine, f"r-{n}"), deadline=deadline()) for n in range(3)]

    assert [place.choice.engine_id for place in places] == ["fake-0"] * 3
    assert own_count(metrics) == 3


async def test_a_router_that_dies_with_asks_waiting_leaves_them_to_the_gateway(
    start_engine: StartEngine, start_router: StartRouter, metrics: GatewayMetrics
) -> None:
    engine = await start_engine()
    router, placements = await start_router(engine)
    router.holds = True
    waiting = asyncio.create_task(placements.place(ask_of(engine), deadline=deadline()))
    await router.wait_until(lambda: bool(router.enqueues))

    await router.stop()
    place = await waiting

    assert place.choice.engine_id == "fake-0"
    assert own_count(metrics) == 1


async def test_a_router_that_goes_away_leaves_those_whom_it_turns_down_to_the_gateway(
    start_engine: StartEngine, start_router: StartRouter, metrics: GatewayMetrics
) -> None:
    """A router that is stopped must not cost more requests than one that is killed."""
    engine = await start_engine()
    router, placements = await start_router(engine)
    router.refusal = Draining("This router is going away; ask another.", retry_after_seconds=1.0)

    place = await placements.place(ask_of(engine), deadline=deadline())

    assert place.choice.engine_id == "fake-0"
    assert own_count(metrics) == 1


async def test_a_router_that_knows_no_engine_of_the_model_makes_the_client_no_mistake(
    start_engine: StartEngine, start_router: StartRouter
) -> None:
    """As after its restart, while the only engine of the model loads: clients take 404 for good."""
    engine = await start_engine()
    router, placements = await start_router(engine)
    router.refusal = ModelNotFound("The model does not exist here.", param="model")

    with pytest.raises(NoEngineAvailable) as caught:
        await placements.place(ask_of(engine), deadline=deadline())

    assert caught.value.retry_after_seconds


async def test_a_router_that_comes_back_is_used_again(
    start_engine: StartEngine, start_router: StartRouter, metrics: GatewayMetrics
) -> None:
    engine = await start_engine()
    router, placements = await start_router(engine)
    address = router.address
    await placements.place(ask_of(engine), deadline=deadline())
    await router.stop()
    await placements.place(ask_of(engine), deadline=deadline())

    await router.start(address)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(router.enqueues) < 2:
            await placements.place(ask_of(engine), deadline=deadline())
            await asyncio.sleep(0.05)

    assert own_count(metrics) >= 1


async def test_a_burst_is_spread_evenly_by_the_own_pick(start_engine: StartEngine, metrics: GatewayMetrics) -> None:
    engines = [await start_engine(f"fake-{number}") for number in range(4)]
    directory = await directory_of(*engines)
    placements = own_placements(directory, metrics)

    places: list[Place] = await asyncio.gather(
        *(placements.place(ask_of(engines[0], f"r-{n}"), deadline=deadline()) for n in range(16))
    )
    for place in places[:8]:
        place.release()
    again = await asyncio.gather(
        *(placements.place(ask_of(engines[0], f"s-{n}"), deadline=deadline()) for n in range(8))
    )

    assert set(Counter(place.choice.engine_id for place in places).values()) == {4}
    assert set(Counter(place.choice.engine_id for place in (*places[8:], *again)).values()) == {4}
    await directory.close()


async def test_the_own_pick_leaves_out_what_cannot_serve(
    start_engine: StartEngine, metrics: GatewayMetrics
) -> None:
    good = await start_engine("good")
    draining, other_model, short, foreign, excluded = [
        await start_engine(name) for name in ("draining", "other-model", "short", "foreign", "excluded")
    ]
    draining.state = engine_pb2.ENGINE_STATE_DRAINING
    other_model.model_name = "another"
    short.max_model_len = 18
    foreign.tokenizer_digest = bytes(32)
    directory = await directory_of(good, draining, other_model, short, foreign, excluded)
    placements = own_placements(directory, metrics)
    ask = dataclasses.replace(ask_of(good), excluded_engine_ids=("excluded",))

    places = [await placements.place(ask, deadline=deadline()) for _ in range(5)]

    assert {place.choice.engine_id for place in places} == {"good"}
    with pytest.raises(NoEngineAvailable):
        await placements.place(
            dataclasses.replace(ask, hash_contract=HashContract(32, "other", bytes(32))), deadline=deadline()
        )
    await directory.close()
