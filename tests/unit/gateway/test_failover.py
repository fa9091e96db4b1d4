"""A request moves on when its engine fails, with the tokens that it has."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from libs.errors import (
    DeadlineExceeded,
    Draining,
    EngineLost,
    InvalidLogits,
    InvalidRequest,
    NoEngineAvailable,
    OctavoError,
    WorkerLost,
)
from libs.obs.metrics import GatewayMetrics
from libs.protogen.engine.v1 import engine_pb2
from libs.protogen.generation.v1 import generation_pb2
from services.gateway.engine_directory import EngineDirectory
from services.gateway.engine_streams import EngineStreams
from services.gateway.failover import FailoverSettings, Generation, Generations
from services.gateway.generation import ChoiceStep, GenerationFinished
from tests.fakes.fake_generation_engine import FakeGenerationEngine, Script, logprob_of
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
    settings: FailoverSettings = SETTINGS,
    **fields: Any,
) -> Generation:
    """A generation that any of the engines may serve; ``fields`` are those of its submission."""
    directory = await directory_of(*engines)
    directories.append(directory)
    generations = Generations(own_placements(directory, metrics), streams, settings, metrics)
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    asked = submission(**fields)
    ask = ask_of(engines[0], asked.request_id)
    return generations.new(ask, asked, deadline=deadline, news=asyncio.Event())


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


# --- With tokens.

TOKEN_IDS = [10, 11, 12, 13, 14, 15]


def whole(num_tokens: int = 6, **fields: Any) -> Script:
    """An engine that knows the whole output and brings so many tokens of it."""
    return Script(token_ids=TOKEN_IDS[:num_tokens], goes_on=True, **fields)


async def read_choices(generation: Generation) -> tuple[dict[int, list[int]], dict[int, GenerationFinished]]:
    """Run it and return all tokens and ends by choice; raises what ended it."""
    run = asyncio.create_task(generation.run())
    token_ids: dict[int, list[int]] = {}
    ends: dict[int, GenerationFinished] = {}
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not run.done() or generation.has_news:
            for step in generation.take():
                token_ids.setdefault(step.choice_index, []).extend(step.token_ids)
                if step.end is not None:
                    assert step.choice_index not in ends
                    ends[step.choice_index] = step.end
            await asyncio.sleep(0.001)
    run.result()
    return token_ids, ends


def value_of(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    "fault",
    [
        {"error": WorkerLost("gone")},
        {"error": EngineLost("gone")},
        {"error": Draining("gone", retry_after_seconds=1.0)},
        {"breaks_stream": True},
        {"reason": generation_pb2.FINISH_REASON_ABORTED},
    ],
    ids=["worker lost", "engine lost", "drained", "stream broken", "given up"],
)
async def test_after_the_first_token_another_engine_goes_on(
    fault: dict[str, Any],
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    other = await start_engine("other", whole())
    other.state = engine_pb2.ENGINE_STATE_STARTING
    engine = await start_engine("first", whole(2, **fault))
    generation = await generation_on([engine, other], streams, metrics, directories)
    other.state = engine_pb2.ENGINE_STATE_READY
    first = await start(generation)
    await directories[0].refresh()

    rest = await read_rest(generation)

    assert first.token_ids + rest == TOKEN_IDS
    again = (engine.submits + other.submits)[1]
    assert [list(choice.output_token_ids) for choice in again.choices] == [TOKEN_IDS[:2]]
    assert again.sampling_params == engine.submits[0].sampling_params
    assert generation.num_retries == 1
    assert generation.num_received_tokens == len(TOKEN_IDS)
    assert value_of(metrics, "octavo_gateway_resumptions_total", outcome="resumed") == 1
    assert value_of(metrics, "octavo_gateway_resume_seconds_count") == 1


async def test_ended_choices_are_not_run_again_and_the_others_keep_their_index(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    done, behind = whole(1), whole(1, hangs=True)
    engine = await start_engine(script=whole())
    engine.scripts.append(whole(3, step_delay_seconds=0.02, breaks_stream=True, other_choices=(done, behind)))
    generation = await generation_on([engine], streams, metrics, directories, num_choices=3)

    token_ids, ends = await read_choices(generation)

    assert token_ids == {0: TOKEN_IDS, 1: TOKEN_IDS[:1], 2: TOKEN_IDS}
    assert ends.keys() == {0, 1, 2}
    again = engine.submits[1].choices
    assert [(choice.choice_index, len(choice.output_token_ids)) for choice in again] == [(0, 3), (2, 1)]
    usage = generation.usage
    assert usage is not None
    assert usage.num_output_tokens == 2 * len(TOKEN_IDS) + 1


async def test_a_choice_that_is_not_wanted_any_more_is_not_run_again(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    # What ends the choice is seen in what came before the loss, but only after it.
    may_break = asyncio.Event()
    engine = await start_engine(script=whole())
    engine.scripts.append(whole(2, breaks_stream=True, last_step_after=may_break))
    generation = await generation_on([engine], streams, metrics, directories, num_choices=2)
    run = asyncio.create_task(generation.run())
    await engine.wait_until(lambda: bool(engine.submits))
    while generation.num_received_tokens < 2:
        await asyncio.sleep(0.001)

    generation.stop_choice(0)
    may_break.set()
    await run

    steps = {step.choice_index: step for step in generation.take()}
    assert steps[1].token_ids == TOKEN_IDS
    assert [choice.choice_index for choice in engine.submits[1].choices] == [1]


async def test_a_long_answer_outlives_several_losses(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=whole())
    # More than may be lost without a token between them.
    engine.scripts.extend(whole(number, error=WorkerLost("gone")) for number in (1, 2, 3, 4, 5))
    generation = await generation_on([engine], streams, metrics, directories)

    token_ids, _ = await read_choices(generation)

    assert token_ids == {0: TOKEN_IDS}
    assert generation.num_retries == 5


async def test_a_request_that_kills_whoever_computes_it_is_given_up_with_its_error(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=whole(2, error=WorkerLost("killed by it")))
    generation = await generation_on([engine], streams, metrics, directories)

    first = await start(generation)
    with pytest.raises(WorkerLost, match="killed by it"):
        await read_rest(generation)

    # The tokens that came are not lost with it.
    assert first.token_ids[0] == TOKEN_IDS[0]
    assert generation.num_received_tokens == 2
    assert len(engine.submits) == 3
    assert value_of(metrics, "octavo_gateway_resumptions_total", outcome="failed") == 1


async def test_one_that_kills_after_each_token_is_given_up_too(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(token_ids=[1], error=WorkerLost("killed by it")))
    generation = await generation_on([engine], streams, metrics, directories, max_output_tokens=1000)

    with pytest.raises(WorkerLost):
        await read_choices(generation)

    assert len(engine.submits) == 9


async def test_an_engine_that_loads_its_model_again_is_waited_for(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=whole())
    loading = Script(error=NoEngineAvailable("loading", retry_after_seconds=2.0))
    # More refusals than losses are borne.
    engine.scripts.extend([whole(2, error=WorkerLost("gone")), loading, loading, loading])
    generation = await generation_on([engine], streams, metrics, directories)

    token_ids, _ = await read_choices(generation)

    assert token_ids == {0: TOKEN_IDS}


async def test_where_no_engine_comes_back_the_wait_ends(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(error=NoEngineAvailable("loading", retry_after_seconds=2.0)))
    engine.scripts.append(whole(2, error=WorkerLost("gone")))
    settings = dataclasses.replace(SETTINGS, patience_seconds=1.0)
    generation = await generation_on([engine], streams, metrics, directories, settings=settings)

    with pytest.raises(NoEngineAvailable):
        await read_choices(generation)

    assert generation.num_received_tokens == 2


@pytest.mark.parametrize("error", [InvalidLogits("NaN"), InvalidRequest("no")])
async def test_an_error_of_the_request_itself_ends_it_with_what_came(
    error: OctavoError,
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=whole(2, error=error))
    generation = await generation_on([engine], streams, metrics, directories)

    first = await start(generation)
    with pytest.raises(type(error)):
        await read_rest(generation)

    assert first.token_ids[0] == TOKEN_IDS[0]
    assert len(engine.submits) == 1


class Relayed:
    """Takes tokens as they come."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def take(self, token_ids: Sequence[int], now: float) -> bool:
        """Take them."""
        self.token_ids += token_ids
        return True

    def flush(self) -> None:
        """Do nothing."""


async def test_tokens_are_relayed_from_the_next_engine_too_and_in_order(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    may_break = asyncio.Event()
    engine = await start_engine(script=whole(step_delay_seconds=0.005))
    engine.scripts.append(whole(3, last_step_after=may_break, breaks_stream=True))
    generation = await generation_on([engine], streams, metrics, directories)
    run = asyncio.create_task(generation.run())
    while generation.num_received_tokens < 2:
        await asyncio.sleep(0.001)
    taken = [token_id for step in generation.take() for token_id in step.token_ids]
    relay = Relayed()
    generation.relay_choice(0, relay)

    may_break.set()
    await run
    (last,) = generation.take()

    assert taken + relay.token_ids + last.token_ids == TOKEN_IDS
    # All but what came with the end.
    assert len(relay.token_ids) == 3
    assert generation.num_received_tokens == len(TOKEN_IDS)


async def test_what_was_not_read_before_the_loss_comes_before_what_is_relayed(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=whole())
    engine.scripts.append(whole(3, breaks_stream=True))
    generation = await generation_on([engine], streams, metrics, directories)
    run = asyncio.create_task(generation.run())
    while generation.num_received_tokens < 3:
        await asyncio.sleep(0.001)
    relay = Relayed()
    generation.relay_choice(0, relay)

    await run

    (step,) = generation.take()
    assert step.token_ids == TOKEN_IDS
    assert relay.token_ids == []


async def test_the_prompts_log_probabilities_come_once_and_each_tokens_with_it(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=whole())
    engine.scripts.append(whole(2, breaks_stream=True))
    fields: dict[str, Any] = {"num_logprobs": 1, "num_prompt_logprobs": 0}
    generation = await generation_on([engine], streams, metrics, directories, **fields)

    await generation.run()
    (step,) = generation.take()

    assert [entry.logprob for entry in step.logprobs] == [logprob_of(token_id) for token_id in TOKEN_IDS]
    # The prompt is 5, 6, 7, and its first token has none.
    assert [entry.logprob for entry in generation.prompt_logprobs] == [logprob_of(6), logprob_of(7)]
    assert not engine.submits[1].sampling_params.HasField("num_prompt_logprobs")


async def test_who_stops_while_another_engine_is_looked_for_leaves_nothing_behind(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(error=NoEngineAvailable("loading", retry_after_seconds=2.0)))
    engine.scripts.append(whole(2, error=WorkerLost("gone")))
    generation = await generation_on([engine], streams, metrics, directories)
    run = asyncio.create_task(generation.run())
    await engine.wait_until(lambda: len(engine.submits) > 2)

    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    generation.stop()
    await generation.settle(PATIENCE_SECONDS)

    assert generation.has_ended
    assert engine.running_ids == []
    assert generation.num_received_tokens == 2


async def test_the_deadline_holds_while_another_engine_is_looked_for(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    engine = await start_engine(script=Script(error=NoEngineAvailable("loading", retry_after_seconds=2.0)))
    engine.scripts.append(whole(2, error=WorkerLost("gone")))
    generation = await generation_on([engine], streams, metrics, directories, timeout_seconds=0.5)

    with pytest.raises(DeadlineExceeded):
        await read_choices(generation)


async def test_one_that_kills_does_not_take_along_those_that_run_beside_it(
    start_engine: StartEngine,
    streams: EngineStreams,
    metrics: GatewayMetrics,
    directories: list[EngineDirectory],
) -> None:
    # It breaks the stream that they share before those that begin with it have a token.
    engine = await start_engine(script=whole(first_delay_seconds=0.03))
    engine.scripts_by_request["r-1"] = whole(0, first_delay_seconds=0.01, breaks_stream=True)
    generations = [
        await generation_on([engine], streams, metrics, directories, request_id=f"r-{number}")
        for number in range(1, 8)
    ]

    killing, *others = await asyncio.gather(*map(read_choices, generations), return_exceptions=True)

    assert isinstance(killing, EngineLost)
    for other in others:
        assert not isinstance(other, BaseException)
        assert other[0] == {0: TOKEN_IDS}
