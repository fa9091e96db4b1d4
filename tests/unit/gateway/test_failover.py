"""A request moves on when its engine fails, with the tokens that it has."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncIterator

import pytest

from libs.errors import (
    DeadlineExceeded,
    EngineLost,
    InvalidRequest,
    NoEngineAvailable,
    WorkerLost,
)
from libs.obs.metrics import GatewayMetrics
from libs.protogen.engine.v1 import engine_pb2
from services.gateway.engine_directory import EngineDirectory
from services.gateway.engine_streams import EngineStreams
from services.gateway.failover import FailoverSettings, Generation, Generations
from services.gateway.generation import ChoiceStep, GenerationFinished
from tests.fakes.fake_generation_engine import FakeGenerationEngine, Script
from tests.patience import PATIENCE_SECONDS
from tests.unit.gateway.conftest import StartEngine, ask_of, directory_of, own_placements, submission

SETTINGS = FailoverSettings(
    max_retries=2,
    retry_placement_timeout_seconds=1.0,
    accept_timeout_seconds=0.3,
    suspicion_seconds=60.0,
    patience_seconds=20.0,
)


@pytest.fixture
async def directories() -> AsyncIterator[list[EngineDirectory]]:
    made: list[EngineDirectory] = []
    yield made
    for directory in made:
        await directory.close()


async def generation_on(
    engines: list[FakeGenerationEngine],
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
    *,
    timeout_seconds: float = 30.0,
) -> Generation:
    directory = await directory_of(*engines)
    directories.append(directory)
    generations = Generations(own_placements(directory, metrics), streams, SETTINGS, metrics)
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    return generations.new(ask_of(engines[0]), submission(), deadline=deadline, news=asyncio.Event())


RUNS: weakref.WeakKeyDictionary[Generation, asyncio.Task[None]] = weakref.WeakKeyDictionary()


async def start(generation: Generation) -> ChoiceStep:
    """Run it and return what came first; raises what ended it before."""
    run = RUNS[generation] = asyncio.create_task(generation.run())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (steps := generation.take()):
            if run.done():
                run.result()
            await asyncio.sleep(0.001)
    (step,) = steps
    return step


async def read_rest(generation: Generation) -> list[int]:
    """Return what one that was started brings until its end; raises what ended it."""
    token_ids: list[int] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.wait([RUNS[generation]])
    for step in generation.take():
        token_ids += step.token_ids
    RUNS[generation].result()
    return token_ids


async def test_a_good_engine_serves_at_once(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(token_ids=[1, 2, 3], step_delay_seconds=0.01))
    generation = await generation_on([engine], streams, metrics, directories)

    first = await start(generation)
    rest = await read_rest(generation)

    assert first.token_ids + rest == [1, 2, 3]
    assert (generation.num_retries, generation.engine_id) == (0, "fake-0")
    assert generation.usage is not None


@pytest.mark.parametrize(
    "fault",
    [
        Script(error=WorkerLost("gone")),
        Script(error=EngineLost("gone")),
        Script(breaks_stream=True),
        Script(is_deaf=True),
    ],
    ids=["worker lost", "engine lost", "stream broken", "never answers"],
)
async def test_before_the_first_token_another_engine_takes_over(
    fault: Script,
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    is_other_known = asyncio.Event()
    bad = await start_engine("bad", dataclasses.replace(fault, last_step_after=is_other_known))
    good = await start_engine("good", Script(token_ids=[7]))
    good.state = engine_pb2.ENGINE_STATE_STARTING
    generation = await generation_on([bad, good], streams, metrics, directories)

    starting = asyncio.create_task(start(generation))
    await bad.wait_until(lambda: bool(bad.submits))
    good.state = engine_pb2.ENGINE_STATE_READY
    await directories[0].refresh()
    is_other_known.set()
    step = await starting

    assert step.token_ids == [7]
    assert (generation.engine_id, generation.num_retries) == ("good", 1)
    assert (len(bad.submits), len(good.submits)) == (1, 1)


@pytest.mark.parametrize("fault", [Script(is_deaf=True), Script(breaks_stream=True)], ids=["deaf", "breaks"])
async def test_an_engine_that_failed_one_request_does_not_get_each_of_the_next_first(
    fault: Script,
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    """It looks idle where requests are placed, so else all of them would wait there before they are served."""
    bad, good = await start_engine("bad", fault), await start_engine("good", Script(token_ids=[7]))
    directory = await directory_of(bad, good)
    directories.append(directory)
    generations = Generations(own_placements(directory, metrics), streams, SETTINGS, metrics)
    num_retries = 0
    for number in range(24):
        request_id = f"r-{number}"
        generation = generations.new(
            ask_of(bad, request_id),
            submission(request_id),
            deadline=asyncio.get_running_loop().time() + 30.0,
            news=asyncio.Event(),
        )
        assert (await start(generation)).token_ids == [7]
        generation.stop()
        num_retries += generation.num_retries

    assert num_retries == len(bad.submits) <= 1
    assert len(good.submits) == 24


async def test_a_suspect_engine_serves_where_there_is_no_other(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(token_ids=[7]))
    engine.scripts.append(Script(breaks_stream=True))
    directory = await directory_of(engine)
    directories.append(directory)
    generations = Generations(own_placements(directory, metrics), streams, SETTINGS, metrics)

    for number in range(2):
        generation = generations.new(
            ask_of(engine, f"r-{number}"),
            submission(f"r-{number}"),
            deadline=asyncio.get_running_loop().time() + 30.0,
            news=asyncio.Event(),
        )
        assert (await start(generation)).token_ids == [7]

    assert len(engine.submits) == 3


async def test_a_lone_engine_is_tried_again(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(token_ids=[7]))
    engine.scripts.append(Script(error=WorkerLost("gone")))
    generation = await generation_on([engine], streams, metrics, directories)

    step = await start(generation)

    assert step.token_ids == [7]
    assert generation.num_retries == 1


async def test_an_engine_that_loads_its_model_again_passes_the_request_on(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    # Its loss of a worker is not known yet where requests are placed.
    loading = await start_engine("a", Script(error=NoEngineAvailable("loading", retry_after_seconds=2.0)))
    ready = await start_engine("b", Script(token_ids=[7]))
    ready.state = engine_pb2.ENGINE_STATE_STARTING
    generation = await generation_on([loading, ready], streams, metrics, directories)
    ready.state = engine_pb2.ENGINE_STATE_READY
    starting = asyncio.create_task(start(generation))
    await loading.wait_until(lambda: bool(loading.submits))
    await directories[0].refresh()

    step = await starting

    assert step.token_ids == [7]
    assert generation.engine_id == "b"


async def test_retries_are_bounded(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(error=WorkerLost("gone for good")))
    generation = await generation_on([engine], streams, metrics, directories)

    with pytest.raises(WorkerLost):
        await generation.run()

    assert len(engine.submits) == 3


async def test_an_error_of_the_request_is_not_retried(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(error=InvalidRequest("no")))
    generation = await generation_on([engine], streams, metrics, directories)

    with pytest.raises(InvalidRequest):
        await generation.run()

    assert len(engine.submits) == 1


async def test_no_engine_at_all_is_said_with_a_time_to_come_back(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine()
    engine.state = engine_pb2.ENGINE_STATE_DRAINING
    generation = await generation_on([engine], streams, metrics, directories)

    with pytest.raises(NoEngineAvailable) as caught:
        await generation.run()

    assert caught.value.retry_after_seconds is not None


async def test_the_deadline_holds_before_the_first_token(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(hangs=True))
    silent = await generation_on([engine], streams, metrics, directories, timeout_seconds=0.2)

    with pytest.raises(DeadlineExceeded):
        await silent.run()
    silent.stop()


async def test_stopping_aborts_and_settles_with_counts(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(token_ids=[1, 2], hangs=True))
    generation = await generation_on([engine], streams, metrics, directories)
    await start(generation)
    assert not generation.has_ended

    generation.stop()
    await generation.settle(5.0)

    assert generation.has_ended
    assert generation.usage is not None
    assert generation.usage.num_output_tokens == 2
    assert engine.aborted_ids == ["r-1"]


async def test_settling_does_not_wait_for_a_deaf_engine(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(is_deaf=True))
    generation = await generation_on([engine], streams, metrics, directories)
    starting = asyncio.create_task(generation.run())
    await engine.wait_until(lambda: bool(engine.submits))
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)

    await generation.settle(0.05)

    assert not generation.has_ended
    assert generation.usage is None


async def test_an_answer_that_ends_with_its_first_step_is_whole(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(token_ids=[5], tokens_per_step=4))
    generation = await generation_on([engine], streams, metrics, directories)

    step = await start(generation)

    assert step.token_ids == [5]
    assert isinstance(step.end, GenerationFinished)
