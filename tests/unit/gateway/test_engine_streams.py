"""One stream for each engine, and exactly one end for each request on it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from libs.errors import EngineLost, InternalError, InvalidLogits, Overloaded
from libs.protogen.generation.v1 import generation_pb2
from services.gateway.engine_streams import EngineStreams
from services.gateway.generation import (
    ChoiceStep,
    FinishReason,
    GenerationEnd,
    GenerationFailed,
    GenerationFinished,
    Submission,
)
from tests.fakes.fake_generation_engine import Script, alternatives_of, logprob_of
from tests.patience import PATIENCE_SECONDS
from tests.unit.gateway.conftest import StartEngine, submission


class Reader:
    """Submits a request and reads it."""

    def __init__(self, streams: EngineStreams, address: str, submission: Submission) -> None:
        self.news = asyncio.Event()
        self.request = streams.submit(address, submission, remaining_seconds=60, news=self.news)

    async def next_steps(self) -> list[ChoiceStep]:
        await self.news.wait()
        self.news.clear()
        return self.request.take()

    async def next_step(self) -> ChoiceStep:
        (step,) = await self.next_steps()
        return step


async def read_all(reader: Reader) -> tuple[list[int], GenerationEnd]:
    token_ids, ends = await read_choices(reader)
    return token_ids.get(0, []), ends[0]


async def read_choices(reader: Reader) -> tuple[dict[int, list[int]], dict[int, GenerationEnd]]:
    token_ids: dict[int, list[int]] = {}
    told: set[int] = set()
    is_over = False
    while not is_over:
        is_over = reader.request.has_ended
        for step in await reader.next_steps() if not is_over else reader.request.take():
            token_ids.setdefault(step.choice_index, []).extend(step.token_ids)
            if step.end is not None:
                assert step.choice_index not in told
                told.add(step.choice_index)
    ends = {choice.index: choice.end for choice in reader.request.choices if choice.end is not None}
    # A failure is for those who may go on elsewhere, and is not read.
    assert told <= {index for index, end in ends.items() if isinstance(end, GenerationFinished)}
    return token_ids, ends


def error_of(end: GenerationEnd) -> Exception:
    assert isinstance(end, GenerationFailed)
    return end.error


async def test_a_request_that_is_over_does_not_wait_for_the_garbage_collector(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine()
    gc.disable()
    try:
        reader = Reader(streams, engine.address, submission(num_choices=2))
        is_held = weakref.ref(reader.request)
        await read_choices(reader)
        del reader

        assert is_held() is None
    finally:
        gc.enable()


async def test_tokens_and_the_end_arrive_in_order(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[4, 5, 6, 7], tokens_per_step=3, num_cached_tokens=2))

    request = Reader(streams, engine.address, submission())
    token_ids, end = await read_all(request)

    assert token_ids == [4, 5, 6, 7]
    assert isinstance(end, GenerationFinished)
    assert end.reason is FinishReason.STOP
    assert (end.usage.num_cached_tokens, end.usage.num_output_tokens) == (2, 4)
    assert list(engine.submits[0].prompt_token_ids) == [5, 6, 7]
    assert 59 < engine.submits[0].remaining_time.seconds + 1 <= 61


async def test_many_requests_share_one_stream(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[1, 2, 3], step_delay_seconds=0.001))

    requests = [Reader(streams, engine.address, submission(f"r-{n}")) for n in range(8)]
    answers = await asyncio.gather(*(read_all(request) for request in requests))

    assert [token_ids for token_ids, _ in answers] == [[1, 2, 3]] * 8
    assert engine.num_streams == 1


async def test_a_slow_reader_finds_all_tokens_merged(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=list(range(1, 11))))
    request = Reader(streams, engine.address, submission())

    await request.request.wait_ended()
    step = await request.next_step()

    assert step.token_ids == list(range(1, 11))
    assert step.end is not None


async def test_a_wait_that_is_cancelled_loses_nothing(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[1, 2, 3, 4], step_delay_seconds=0.02))
    request = Reader(streams, engine.address, submission())
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
    request = Reader(streams, engine.address, submission())
    await request.next_step()

    request.request.abort()
    request.request.abort()
    await request.request.wait_ended()
    _, end = await read_all(request)

    assert isinstance(end, GenerationFinished)
    assert end.reason is FinishReason.ABORTED
    assert end.usage.num_output_tokens == 2
    assert engine.aborted_ids == ["r-1"]


async def test_an_engine_that_gives_up_unasked_is_a_loss(start_engine: StartEngine, streams: EngineStreams) -> None:
    aborted = Script(token_ids=[1], reason=generation_pb2.FINISH_REASON_ABORTED)
    engine = await start_engine(script=aborted)
    request = Reader(streams, engine.address, submission())

    _, end = await read_all(request)

    assert isinstance(error_of(end), EngineLost)


async def test_a_failed_request_has_its_error_and_the_others_go_on(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine()
    engine.scripts.extend(
        [Script(token_ids=[1], error=InvalidLogits("NaN")), Script(token_ids=[1, 2], step_delay_seconds=0.01)]
    )

    bad = Reader(streams, engine.address, submission("bad"))
    good = Reader(streams, engine.address, submission("good"))

    assert isinstance(error_of((await read_all(bad))[1]), InvalidLogits)
    assert isinstance((await read_all(good))[1], GenerationFinished)


async def test_a_lost_engine_ends_all_requests_and_a_new_stream_is_opened(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine(script=Script(token_ids=[1], hangs=True))
    requests = [Reader(streams, engine.address, submission(f"r-{n}")) for n in range(3)]
    for request in requests:
        await request.next_step()
    address = engine.address

    await engine.stop()
    ends = [(await read_all(request))[1] for request in requests]
    engine.default_script = Script(token_ids=[9])
    await engine.start(address)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            again = Reader(streams, address, submission("again"))
            token_ids, end = await read_all(again)
            if isinstance(end, GenerationFinished):
                break

    assert all(isinstance(error_of(end), EngineLost) for end in ends)
    assert token_ids == [9]


async def test_a_stream_that_the_engine_ends_is_a_loss(start_engine: StartEngine, streams: EngineStreams) -> None:
    engine = await start_engine(script=Script(token_ids=[1], breaks_stream=True))
    request = Reader(streams, engine.address, submission())

    _, end = await read_all(request)

    assert isinstance(error_of(end), EngineLost)


async def test_nobody_listening_is_a_loss(streams: EngineStreams) -> None:
    request = Reader(streams, "127.0.0.1:1", submission())

    async with asyncio.timeout(PATIENCE_SECONDS):
        await request.request.wait_accepted()
        _, end = await read_all(request)

    assert isinstance(error_of(end), EngineLost)


async def test_a_full_stream_refuses_with_a_time_to_come_back(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine(script=Script(hangs=True))
    for number in range(8):
        Reader(streams, engine.address, submission(f"r-{number}"))

    with pytest.raises(Overloaded) as caught:
        Reader(streams, engine.address, submission("one-too-many"))

    assert caught.value.retry_after_seconds is not None


async def test_closing_ends_what_is_open(start_engine: StartEngine) -> None:
    engine = await start_engine(script=Script(token_ids=[1], hangs=True))
    async with asyncio.TaskGroup() as tasks:
        streams = EngineStreams(max_requests=8, tasks=tasks)
        request = Reader(streams, engine.address, submission())
        await request.next_step()
        streams.close()
    _, end = await read_all(request)

    assert isinstance(error_of(end), EngineLost)


async def test_log_probabilities_stay_with_their_tokens_however_late_they_are_read(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    token_ids = list(range(1, 11))
    engine = await start_engine(script=Script(token_ids=token_ids, tokens_per_step=3))
    reader = Reader(streams, engine.address, submission(num_logprobs=2, num_prompt_logprobs=1))

    await reader.request.wait_ended()
    (step,) = reader.request.take()

    assert step.token_ids == token_ids
    assert [entry.logprob for entry in step.logprobs] == [logprob_of(token_id) for token_id in token_ids]
    assert [list(entry.alternatives) for entry in step.logprobs] == [
        alternatives_of(token_id, 2) for token_id in token_ids
    ]
    # The prompt is 5, 6, 7, and its first token has none.
    assert [entry.logprob for entry in reader.request.prompt_logprobs] == [logprob_of(6), logprob_of(7)]
    assert [entry.rank for entry in reader.request.prompt_logprobs] == [6 % 9 + 1, 7 % 9 + 1]


# --- Several choices.


async def test_choices_have_tokens_and_ends_of_their_own_and_one_usage(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    others = (Script(token_ids=[4], num_cached_tokens=3), Script(token_ids=[5, 6, 7, 8]))
    engine = await start_engine(script=Script(token_ids=[1, 2], num_cached_tokens=2, other_choices=others))

    reader = Reader(streams, engine.address, submission(num_choices=3))
    token_ids, ends = await read_choices(reader)

    assert token_ids == {0: [1, 2], 1: [4], 2: [5, 6, 7, 8]}
    assert all(isinstance(end, GenerationFinished) for end in ends.values())
    assert len(engine.submits[0].choices) == 3
    usage = reader.request.usage
    assert usage is not None
    # The prompt was found in the cache once; outputs add up.
    assert (usage.num_cached_tokens, usage.num_output_tokens) == (2, 7)
    assert reader.request.has_ended
    assert reader.request.num_received_tokens == 7


async def test_one_choice_is_aborted_and_the_others_go_on(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine(script=Script(token_ids=[1], hangs=True, other_choices=(Script(token_ids=[2, 3]),)))
    reader = Reader(streams, engine.address, submission(num_choices=2))
    await reader.next_steps()

    reader.request.abort_choice(0)
    reader.request.abort_choice(0)
    await reader.request.wait_ended()
    ends = {step.choice_index: step.end for step in reader.request.take() if step.end is not None}

    aborted = ends[0]
    assert isinstance(aborted, GenerationFinished)
    assert aborted.reason is FinishReason.ABORTED
    assert engine.partly_aborted == [("r-1", 1)]
    assert engine.aborted_ids == []


async def test_a_lost_engine_ends_every_choice(start_engine: StartEngine, streams: EngineStreams) -> None:
    done = Script(token_ids=[2])
    engine = await start_engine(script=Script(token_ids=[1], hangs=True, other_choices=(done,)))
    reader = Reader(streams, engine.address, submission(num_choices=2))
    await reader.next_steps()

    await engine.stop()
    _, ends = await read_choices(reader)

    assert isinstance(error_of(ends[0]), EngineLost)


async def test_an_engine_that_starts_another_number_of_choices_is_refused(
    start_engine: StartEngine, streams: EngineStreams
) -> None:
    engine = await start_engine()
    engine.num_choices_started = 1

    reader = Reader(streams, engine.address, submission(num_choices=2))
    _, ends = await read_choices(reader)

    assert all(isinstance(error_of(end), InternalError) for end in ends.values())
