"""One stream for each engine, and exactly one end for each request on it."""

from __future__ import annotations

import asyncio

import pytest

from libs.errors import EngineLost, InvalidLogits, Overloaded
from libs.protogen.generation.v1 import generation_pb2
from services.gateway.engine_streams import EngineRequest, EngineStreams
from services.gateway.generation import FinishReason, GenerationEnd, GenerationFailed, GenerationFinished
from tests.fakes.fake_generation_engine import Script
from tests.unit.gateway.conftest import StartEngine, submission


async def read_all(request: EngineRequest) -> tuple[list[int], GenerationEnd]:
    token_ids: list[int] = []
    while True:
        step = await request.next_step()
        token_ids += step.token_ids
        if step.end is not None:
            return token_ids, step.end


def error_of(end: GenerationEnd) -> Exception:
    assert isinstance(end, GenerationFailed)
    return end.error


async def test_tokens_and_the_end_arrive_in_order(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[4, 5, 6, 7], tokens_per_step=3, num_cached_tokens=2))

    request = streams.submit(engine.address, submission(), remaining_seconds=60)
    token_ids, end = await read_all(request)

    assert token_ids == [4, 5, 6, 7]
    assert isinstance(end, GenerationFinished)
    assert end.reason is FinishReason.STOP
    assert (end.usage.num_cached_tokens, end.usage.num_output_tokens) == (2, 4)
    assert list(engine.submits[0].prompt_token_ids) == [5, 6, 7]
    assert 59 < engine.submits[0].remaining_time.seconds + 1 <= 61


async def test_many_requests_share_one_stream(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[1, 2, 3], step_delay_seconds=0.001))

    requests = [streams.submit(engine.address, submission(f"r-{n}"), remaining_seconds=60) for n in range(8)]
    answers = await asyncio.gather(*(read_all(request) for request in requests))

    assert [token_ids for token_ids, _ in answers] == [[1, 2, 3]] * 8
    assert engine.num_streams == 1


async def test_a_slow_reader_finds_all_tokens_merged(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=list(range(1, 11))))
    request = streams.submit(engine.address, submission(), remaining_seconds=60)

    await request.wait_ended()
    step = await request.next_step()

    assert step.token_ids == list(range(1, 11))
    assert step.end is not None


async def test_a_wait_that_is_cancelled_loses_nothing(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[1, 2, 3, 4], step_delay_seconds=0.02))
    request = streams.submit(engine.address, submission(), remaining_seconds=60)
    token_ids: list[int] = []
    end: GenerationEnd | None = None

    while end is None:
        try:
            async with asyncio.timeout(0.003):
                step = await request.next_step()
        except TimeoutError:
            continue
        token_ids, end = token_ids + step.token_ids, step.end

    assert token_ids == [1, 2, 3, 4]


async def test_an_abort_is_confirmed_with_counts(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[1, 2], hangs=True))
    request = streams.submit(engine.address, submission(), remaining_seconds=60)
    await request.next_step()

    request.abort()
    request.abort()
    await request.wait_ended()

    assert isinstance(request.end, GenerationFinished)
    assert request.end.reason is FinishReason.ABORTED
    assert request.end.usage.num_output_tokens == 2
    assert engine.aborted_ids == ["r-1"]


async def test_an_engine_that_gives_up_unasked_is_a_loss(start_engine: StartEngine, streams: EngineStreams) -> None:
    aborted = Script(token_ids=[1], reason=generation_pb2.FINISH_REASON_ABORTED)
    engine = await start_engine(script=aborted)
    request = streams.submit(engine.address, submission(), remaining_seconds=60)

    _, end = await read_all(request)

    assert isinstance(error_of(end), EngineLost)


async def test_a_failed_request_has_its_error_and_the_others_go_on(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine()
    engine.scripts.extend(
        [Script(token_ids=[1], error=InvalidLogits("NaN")), Script(token_ids=[1, 2], step_delay_seconds=0.01)]
    )

    bad = streams.submit(engine.address, submission("bad"), remaining_seconds=60)
    good = streams.submit(engine.address, submission("good"), remaining_seconds=60)

    assert isinstance(error_of((await read_all(bad))[1]), InvalidLogits)
    assert isinstance((await read_all(good))[1], GenerationFinished)


async def test_a_lost_engine_ends_all_requests_and_a_new_stream_is_opened(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine(script=Script(token_ids=[1], hangs=True))
    requests = [streams.submit(engine.address, submission(f"r-{n}"), remaining_seconds=60) for n in range(3)]
    for request in requests:
        await request.next_step()
    address = engine.address

    await engine.stop()
    ends = [(await read_all(request))[1] for request in requests]
    engine.default_script = Script(token_ids=[9])
    await engine.start(address)
    async with asyncio.timeout(10):
        while True:
            again = streams.submit(address, submission("again"), remaining_seconds=60)
            token_ids, end = await read_all(again)
            if isinstance(end, GenerationFinished):
                break

    assert all(isinstance(error_of(end), EngineLost) for end in ends)
    assert token_ids == [9]


async def test_a_stream_that_the_engine_ends_is_a_loss(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[1], breaks_stream=True))
    request = streams.submit(engine.address, submission(), remaining_seconds=60)

    _, end = await read_all(request)

    assert isinstance(error_of(end), EngineLost)


async def test_nobody_listening_is_a_loss(streams: EngineStreams) -> None:
    request = streams.submit("127.0.0.1:1", submission(), remaining_seconds=60)

    async with asyncio.timeout(10):
        await request.wait_accepted()
        _, end = await read_all(request)

    assert isinstance(error_of(end), EngineLost)


async def test_a_full_stream_refuses_with_a_time_to_come_back(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine(script=Script(hangs=True))
    for number in range(8):
        streams.submit(engine.address, submission(f"r-{number}"), remaining_seconds=60)

    with pytest.raises(Overloaded) as caught:
        streams.submit(engine.address, submission("one-too-many"), remaining_seconds=60)

    assert caught.value.retry_after_seconds is not None


async def test_closing_ends_what_is_open(start_engine: StartEngine) -> None:
    engine = await start_engine(script=Script(token_ids=[1], hangs=True))
    async with asyncio.TaskGroup() as tasks:
        streams = EngineStreams(max_requests=8, tasks=tasks)
        request = streams.submit(engine.address, submission(), remaining_seconds=60)
        await request.next_step()
        streams.close()

    assert request.end is not None
    assert isinstance(error_of(request.end), EngineLost)
