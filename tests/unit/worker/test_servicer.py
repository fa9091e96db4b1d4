from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from libs.errors import Cancelled, InternalError, InvalidRequest, ModelLoadFailed, OctavoError, WorkerLost
from libs.obs.metrics import WorkerMetrics
from libs.protogen.generation.v1 import generation_pb2
from libs.protogen.worker.v1 import worker_pb2, worker_pb2_grpc
from libs.rpc import make_channel, make_server, open_stream
from services.worker.config import RunnerKind, WorkerConfig
from services.worker.servicer import WorkerServicer, registration
from services.worker.step import LoadedModel, LoadProgress, LoadRequest, StepInput, StepResult
from services.worker.stub_runner import StubRunner
from tests.patience import PATIENCE_SECONDS

LOAD = worker_pb2.LoadModelRequest(
    rank=0, tensor_parallel_size=1, block_size=4, max_num_seqs=8, max_num_batched_tokens=64
)


class WatchedRunner:
    """The stub runner with doors: loading and steps wait until they are let through."""

    def __init__(self) -> None:
        self._stub = StubRunner(WorkerConfig(runner=RunnerKind.STUB))
        self.num_loads = 0
        self.num_steps = 0
        self.may_load = threading.Event()
        self.may_step = threading.Event()
        self.is_in_step = threading.Event()
        self.may_load.set()
        self.may_step.set()
        self.load_error: Exception | None = None

    def load(self, request: LoadRequest, on_progress: Callable[[LoadProgress], None]) -> LoadedModel:
        self.num_loads += 1
        on_progress(LoadProgress("reading", 30, 100))
        assert self.may_load.wait(PATIENCE_SECONDS)
        if self.load_error is not None:
            raise self.load_error
        return self._stub.load(request, on_progress)

    def execute(self, step: StepInput) -> StepResult:
        self.num_steps += 1
        self.is_in_step.set()
        assert self.may_step.wait(PATIENCE_SECONDS)
        return self._stub.execute(step)

    def reset(self) -> None:
        self._stub.reset()


class Worker:
    """A served worker and a client of it."""

    def __init__(self, address: str) -> None:
        self.runner = WatchedRunner()
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.servicer = WorkerServicer(self.runner, self.metrics, model_name="small")
        self.server = make_server(address, [registration(self.servicer)])
        self.channel = make_channel(address)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)

    @property
    def loading(self) -> LoadRequest | None:
        """The load that was asked for last."""
        return None if self.servicer._load is None else self.servicer._load.request

    @property
    def num_waiting_for_the_thread(self) -> int:
        """Loads, steps and new streams that the runner's thread has yet to begin."""
        return self.servicer._thread._work_queue.qsize()

    async def load(self, request: worker_pb2.LoadModelRequest = LOAD) -> list[worker_pb2.LoadModelResponse]:
        async with open_stream(self.stub.LoadModel, request, on_lost=WorkerLost) as stream:
            return [report async for report in stream]

    @asynccontextmanager
    async def steps(self) -> AsyncIterator[Steps]:
        async with open_stream(self.stub.ExecuteSteps, on_lost=WorkerLost) as stream:
            yield Steps(stream)


class Steps:
    """An open stream of steps."""

    def __init__(self, stream) -> None:  # type: ignore[no-untyped-def]
        self.stream = stream
        self._answers = aiter(stream)

    async def send(self, **fields: Any) -> None:  # Any: the fields of the message.
        await self.stream.send(worker_pb2.ExecuteStepsRequest(**fields))

    async def answer(self) -> worker_pb2.ExecuteStepsResponse:
        response: worker_pb2.ExecuteStepsResponse = await anext(self._answers)
        return response


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


def new(slot: int, token_ids: list[int]) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        slot=slot,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling_params=generation_pb2.SamplingParams(max_output_tokens=8),
    )


FIRST_STEP = {
    "step_id": 1,
    "new_sequences": [new(0, [20, 21])],
    "slots": [0],
    "num_scheduled_tokens": [2],
    "num_new_blocks": [1],
    "new_block_ids": [3],
}
NEXT_STEP = {"step_id": 2, "slots": [0], "num_scheduled_tokens": [1], "num_new_blocks": [0]}


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    served = Worker(f"unix:{tmp_path}/worker.sock")
    await served.server.start()
    yield served
    served.runner.may_load.set()
    served.runner.may_step.set()
    await served.channel.close()
    await served.server.stop(0.1)
    await served.servicer.close()


async def test_loading_reports_progress_and_ends_with_the_model(worker: Worker) -> None:
    worker.runner.may_load.clear()
    async with open_stream(worker.stub.LoadModel, LOAD, on_lost=WorkerLost) as stream:
        reports = aiter(stream)
        first = await anext(reports)
        worker.runner.may_load.set()
        rest = [report async for report in reports]

    assert (first.progress.loaded_bytes, first.progress.total_bytes) == (30, 100)
    assert rest[-1].model.num_blocks == 4_096
    assert [report.WhichOneof("report") for report in rest].count("model") == 1


async def test_the_same_model_is_loaded_once(worker: Worker) -> None:
    worker.runner.may_load.clear()
    at_once = [asyncio.create_task(worker.load()) for _ in range(3)]
    await asyncio.sleep(0.05)
    worker.runner.may_load.set()

    reports = [*await asyncio.gather(*at_once), await worker.load()]

    assert worker.runner.num_loads == 1
    assert len({each[-1].SerializeToString() for each in reports}) == 1


async def test_a_load_goes_on_when_its_caller_leaves(worker: Worker) -> None:
    worker.runner.may_load.clear()
    async with open_stream(worker.stub.LoadModel, LOAD, on_lost=WorkerLost) as stream:
        await anext(aiter(stream))
    worker.runner.may_load.set()

    reports = await worker.load()

    assert reports[-1].model.num_blocks == 4_096
    assert worker.runner.num_loads == 1


async def test_another_request_loads_anew(worker: Worker) -> None:
    await worker.load()
    other = worker_pb2.LoadModelRequest()
    other.CopyFrom(LOAD)
    other.block_size = 8

    reports = await worker.load(other)

    assert reports[-1].model.block_size == 8
    assert worker.runner.num_loads == 2


async def test_a_failed_load_tells_why_and_may_be_tried_again(worker: Worker) -> None:
    worker.runner.load_error = ModelLoadFailed("No such file.")
    with pytest.raises(ModelLoadFailed, match="No such file"):
        await worker.load()
    worker.runner.load_error = None

    reports = await worker.load()

    assert reports[-1].HasField("model")


@pytest.mark.parametrize("error", [MemoryError("no room"), ValueError("a damaged file"), KeyError("a")])
async def test_a_load_that_fails_in_an_unknown_way_has_failed_for_good(worker: Worker, error: Exception) -> None:
    # As a fault of ours or a lost worker it would be tried again and again, and nobody would hear why.
    worker.runner.load_error = error

    with pytest.raises(ModelLoadFailed, match=type(error).__name__):
        await worker.load()


async def test_a_load_that_cannot_be_is_refused(worker: Worker) -> None:
    request = worker_pb2.LoadModelRequest()
    request.CopyFrom(LOAD)
    request.tensor_parallel_size = 4

    # Without the id of a group the ranks could not find each other.
    with pytest.raises(InvalidRequest, match="group_id"):
        await worker.load(request)


async def test_only_rank_0_answers_steps(worker: Worker) -> None:
    request = worker_pb2.LoadModelRequest()
    request.CopyFrom(LOAD)
    request.rank, request.tensor_parallel_size, request.group_id = 1, 2, "a" * 32
    await worker.load(request)
    async with worker.steps() as steps:
        await steps.send(**FIRST_STEP)
        await steps.send(**NEXT_STEP)
        await until(lambda: worker.metrics.steps._value.get() == 2)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await steps.answer()


async def test_a_load_that_another_replaces_ends_at_its_next_report(worker: Worker) -> None:
    other = worker_pb2.LoadModelRequest()
    other.CopyFrom(LOAD)
    other.block_size = 8
    worker.runner.may_load.clear()
    first = asyncio.create_task(worker.load())
    await until(lambda: worker.runner.num_loads == 1)
    second = asyncio.create_task(worker.load(other))
    await until(lambda: worker.loading is not None and worker.loading.block_size == 8)

    worker.runner.may_load.set()

    with pytest.raises(Cancelled, match="loaded anew"):
        await first
    assert (await second)[-1].model.block_size == 8


async def test_steps_are_answered_in_order(worker: Worker) -> None:
    await worker.load()
    async with worker.steps() as steps:
        await steps.send(**FIRST_STEP)
        await steps.send(**NEXT_STEP)
        await steps.send(**NEXT_STEP | {"step_id": 3})

        answers = [await steps.answer() for _ in range(3)]

    assert [answer.step_id for answer in answers] == [1, 2, 3]
    assert [list(answer.slots) for answer in answers] == [[0], [0], [0]]
    assert worker.metrics.steps._value.get() == 3
    assert worker.metrics.tokens._value.get() == 4


async def test_steps_before_loading_are_refused(worker: Worker) -> None:
    async with worker.steps() as steps:
        with pytest.raises(ModelLoadFailed, match="call LoadModel first"):
            await steps.answer()


async def test_a_new_stream_ends_the_older_one_and_starts_from_no_sequences(worker: Worker) -> None:
    await worker.load()
    async with worker.steps() as older:
        await older.send(**FIRST_STEP)
        await older.answer()
        async with worker.steps() as newer:
            await newer.send(**FIRST_STEP)
            answer = await newer.answer()

            with pytest.raises(Cancelled, match="Another stream"):
                await older.answer()

    assert list(answer.slots) == [0]


async def test_a_step_of_an_ended_stream_does_not_reach_the_new_one(worker: Worker) -> None:
    await worker.load()
    async with worker.steps() as older:
        worker.runner.may_step.clear()
        await older.send(**FIRST_STEP)
        await older.send(**NEXT_STEP)
        assert await asyncio.to_thread(worker.runner.is_in_step.wait, PATIENCE_SECONDS)
        await until(lambda: worker.num_waiting_for_the_thread == 1)
        async with worker.steps() as newer:
            await newer.send(**FIRST_STEP)
            # The newer stream's beginning, behind the older one's second step.
            await until(lambda: worker.num_waiting_for_the_thread == 2)
            worker.runner.may_step.set()
            answer = await newer.answer()

    assert answer.step_id == 1
    assert worker.runner.num_steps == 2


async def test_a_step_that_waits_begins_while_the_loop_is_busy(worker: Worker) -> None:
    await worker.load()
    async with worker.steps() as steps:
        worker.runner.may_step.clear()
        await steps.send(**FIRST_STEP)
        await steps.send(**NEXT_STEP)
        assert await asyncio.to_thread(worker.runner.is_in_step.wait, PATIENCE_SECONDS)
        await until(lambda: worker.num_waiting_for_the_thread == 1)
        worker.runner.is_in_step.clear()

        worker.runner.may_step.set()
        has_begun = worker.runner.is_in_step.wait(PATIENCE_SECONDS)  # The loop does nothing else meanwhile.

    assert has_begun
    assert worker.runner.num_steps == 2


async def test_a_step_behind_one_that_failed_does_not_run(worker: Worker) -> None:
    await worker.load()
    async with worker.steps() as steps:
        worker.runner.may_step.clear()
        await steps.send(**FIRST_STEP | {"new_sequences": []})
        await steps.send(**FIRST_STEP)
        assert await asyncio.to_thread(worker.runner.is_in_step.wait, PATIENCE_SECONDS)
        await until(lambda: worker.num_waiting_for_the_thread == 1)
        worker.runner.may_step.set()

        with pytest.raises(InternalError):
            await steps.answer()

    assert worker.runner.num_steps == 1


async def test_a_stream_that_breaks_during_a_step_frees_the_slots(worker: Worker) -> None:
    await worker.load()
    worker.runner.may_step.clear()
    async with worker.steps() as steps:
        await steps.send(**FIRST_STEP)
        assert await asyncio.to_thread(worker.runner.is_in_step.wait, PATIENCE_SECONDS)
    worker.runner.may_step.set()

    async with worker.steps() as steps:
        await steps.send(**FIRST_STEP)
        assert list((await steps.answer()).slots) == [0]


async def test_the_server_answers_while_a_step_runs(worker: Worker) -> None:
    await worker.load()
    worker.runner.may_step.clear()
    async with worker.steps() as steps:
        await steps.send(**FIRST_STEP)
        assert await asyncio.to_thread(worker.runner.is_in_step.wait, PATIENCE_SECONDS)

        reports = await worker.load()

        worker.runner.may_step.set()
        await steps.answer()
    assert reports[-1].HasField("model")


@pytest.mark.parametrize(
    ("fields", "error_class", "words"),
    [
        (NEXT_STEP, InternalError, "hold no sequence"),
        (FIRST_STEP | {"new_block_ids": [5_000]}, InternalError, "there are 4096"),
    ],
)
async def test_a_step_that_does_not_fit_ends_the_stream(
    worker: Worker, fields: dict[str, object], error_class: type[OctavoError], words: str
) -> None:
    await worker.load()
    async with worker.steps() as steps:
        await steps.send(**fields)

        with pytest.raises(error_class, match=words):
            await steps.answer()


async def test_a_fault_of_the_runner_ends_the_stream_with_its_name(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.load()

    def fail(step: StepInput) -> StepResult:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(worker.runner, "execute", fail)
    async with worker.steps() as steps:
        await steps.send(**FIRST_STEP)

        with pytest.raises(InternalError, match="ZeroDivisionError: by zero"):
            await steps.answer()


async def test_a_step_that_cannot_be_read_ends_the_stream_with_the_reason(worker: Worker) -> None:
    await worker.load()
    execute: Any = worker.channel.stream_stream("/octavo.worker.v1.WorkerService/ExecuteSteps")

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(execute(iter([b"\xff\xff\xff"]))))

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with worker.steps() as steps:
        await steps.send(step_id=1)
        assert (await steps.answer()).step_id == 1
