"""The worker's gRPC service.

Owns that there is one model and one stream of steps, and that torch runs in one thread beside the event loop. It
must not know what a runner does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import grpc.aio

from libs.errors import Cancelled, InternalError, ModelLoadFailed, OctavoError
from libs.obs import get_logger
from libs.obs.metrics import WorkerMetrics
from libs.protogen.worker.v1 import worker_pb2, worker_pb2_grpc
from libs.rpc import Registration, abort_with
from services.worker import wire
from services.worker.step import LoadedModel, LoadProgress, LoadRequest, ModelRunner
from services.worker.step_meter import StepMeter

SERVICE_NAME = "octavo.worker.v1.WorkerService"
# Its health is that of the model: a server takes calls before there is one.
MODEL_HEALTH = "octavo.worker.v1.Model"

_PROGRESS_INTERVAL_SECONDS = 0.5
# An engine has few in flight.
_MAX_SUBMITTED_STEPS = 8

ResultT = TypeVar("ResultT")
_RunningStep = asyncio.Future[worker_pb2.ExecuteStepsResponse]

_log = get_logger("worker")


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Loads the model when asked and runs steps in the order in which they come."""

    def __init__(self, runner: ModelRunner, metrics: WorkerMetrics, *, model_name: str) -> None:
        self._runner = runner
        self._meter = StepMeter(metrics)
        self._model_name = model_name
        # One thread for loading and steps: a step never runs beside another or beside a load.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")
        self._load: _Load | None = None
        self._stream: _StepStream | None = None

    async def LoadModel(
        self,
        request: worker_pb2.LoadModelRequest,
        context: grpc.aio.ServicerContext[worker_pb2.LoadModelRequest, worker_pb2.LoadModelResponse],
    ) -> AsyncIterator[worker_pb2.LoadModelResponse]:
        """Load the model, or join a load of the same that is under way or done."""
        try:
            load = self._load_for(wire.load_request_of(request))
            async for progress in load.progress_until_done():
                yield wire.progress_response(progress)
            yield wire.loaded_response(load.result())
        except OctavoError as error:
            await abort_with(context, error)

    async def ExecuteSteps(
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteStepsRequest],
        context: grpc.aio.ServicerContext[worker_pb2.ExecuteStepsRequest, worker_pb2.ExecuteStepsResponse],
    ) -> AsyncIterator[worker_pb2.ExecuteStepsResponse]:
        """Run the steps of one engine. A new stream ends the older one and starts from no sequences."""
        stream = _StepStream()
        try:
            await self._take_over(stream)
            async for response in self._run_steps(stream, request_iterator):
                # All ranks have come to the same tokens.
                if self._load is not None and self._load.request.rank == 0:
                    yield response
        except OctavoError as error:
            _log.error("step stream failed", error=error.message, error_class=type(error).__name__)
            await abort_with(context, error)
        finally:
            # Steps of it that wait for the thread are not to run.
            stream.end(Cancelled("The stream of steps is over."))
            if self._stream is stream:
                self._stream = None

    @property
    def is_loaded(self) -> bool:
        """Whether there is a model."""
        return self._load is not None and self._load.is_loaded

    async def close(self) -> None:
        """Wait for the step or load that is running, and end the thread."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    def _load_for(self, request: LoadRequest) -> _Load:
        if self._load is None or self._load.has_failed or self._load.request != request:
            self._end_stream(Cancelled("The model is loaded anew."))
            if self._load is not None:
                self._load.supersede()
            self._load = _Load(request, self._model_name)
            self._load.task = asyncio.create_task(self._run_load(self._load))
        return self._load

    async def _run_load(self, load: _Load) -> LoadedModel:
        # The task is the servicer's, not the caller's: a load goes on when the engine that asked for it leaves.
        try:
            model = await self._start(lambda: self._runner.load(load.request, load.report))
        except OctavoError:
            raise
        except Exception as error:
            # A file that nobody has thought of, or too little memory: an engine that took this for a lost worker
            # would load again and again.
            _log.exception("load failed")
            raise ModelLoadFailed(f"Loading the model failed: {type(error).__name__}: {error}") from error
        self._meter.model_loaded(model)
        _log.info(
            "model loaded",
            model=self._model_name,
            num_blocks=model.num_blocks,
            kv_cache_bytes=model.kv_cache_bytes,
            weights_bytes=model.weights_bytes,
            max_model_len=model.max_model_len,
        )
        return model

    async def _take_over(self, stream: _StepStream) -> None:
        if self._load is None or not self._load.is_loaded:
            raise ModelLoadFailed("No model is loaded; call LoadModel first and wait for its end.")
        self._end_stream(Cancelled("Another stream of steps was opened; this worker takes its steps from there."))
        self._stream = stream
        # Runs after the older stream's last step, which the thread may still be computing.
        await self._in_thread(self._begin_stream)

    def _begin_stream(self) -> None:
        """Start from no sequences, in the runner's thread."""
        self._runner.reset()
        self._meter.stream_opened()

    def _end_stream(self, error: Cancelled) -> None:
        if self._stream is not None:
            self._stream.end(error)
            self._stream = None

    async def _run_steps(
        self, stream: _StepStream, requests: AsyncIterator[worker_pb2.ExecuteStepsRequest]
    ) -> AsyncIterator[worker_pb2.ExecuteStepsResponse]:
        # A step that comes while one runs is handed to the thread at once: it begins when that one ends, without
        # waiting for this loop.
        reading = asyncio.create_task(self._submit_steps(stream, requests))
        try:
            while (running := await stream.next_submitted()) is not None:
                yield await self._outcome(running)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _submit_steps(
        self, stream: _StepStream, requests: AsyncIterator[worker_pb2.ExecuteStepsRequest]
    ) -> None:
        """Hand steps to the runner's thread until the engine has no more."""
        try:
            async for request in requests:
                await stream.submit(self._start(partial(self._execute, stream, request)))
            await stream.submit(None)
        except OctavoError as error:
            stream.end(error)
        except Exception as error:
            # Whatever gRPC raises here: nothing more comes.
            stream.end(Cancelled(f"The engine's steps cannot be read: {type(error).__name__}: {error}"))

    def _execute(
        self, stream: _StepStream, request: worker_pb2.ExecuteStepsRequest
    ) -> worker_pb2.ExecuteStepsResponse:
        """Run one step in the runner's thread."""
        # A stream that was taken over while this step waited must not touch the new one's sequences.
        stream.raise_if_ended()
        try:
            step = wire.step_input_of(request)
            started = time.perf_counter()
            result = self._runner.execute(step)
        except BaseException:
            # Those behind it count on what it would have done.
            stream.forbid(Cancelled("An earlier step failed."))
            raise
        self._meter.step_done(step, result, started=started, ended=time.perf_counter())
        return wire.step_response(result)

    async def _in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await self._outcome(self._start(work))

    def _start(self, work: Callable[[], ResultT]) -> asyncio.Future[ResultT]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _outcome(self, running: asyncio.Future[ResultT]) -> ResultT:
        try:
            return await running
        except OctavoError:
            raise
        except Exception as error:
            # Whatever torch or a fault of ours raises ends the call, with its trace in our log.
            _log.exception("runner failed")
            raise InternalError(f"The runner failed: {type(error).__name__}: {error}") from error


class _Load:
    """One load of the model, which several calls may wait for."""

    def __init__(self, request: LoadRequest, model_name: str) -> None:
        self.request = request
        self.task: asyncio.Task[LoadedModel] | None = None
        self._model_name = model_name
        self._progress = LoadProgress("starting", 0, 0)
        self._logged: LoadProgress | None = None
        self._is_superseded = False

    @property
    def is_loaded(self) -> bool:
        """Whether the model is there."""
        return self.task is not None and self.task.done() and not self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether it ended without a model."""
        task = self.task
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    def report(self, progress: LoadProgress) -> None:
        """Take a progress report, called from the runner's thread; raises Cancelled when another load waits."""
        if self._is_superseded:
            raise Cancelled("The model is loaded anew.")
        self._progress = progress

    def supersede(self) -> None:
        """Let the load end at its next report: nobody wants it any more."""
        self._is_superseded = True

    def result(self) -> LoadedModel:
        """Return the model or raise what went wrong; only when the load is done."""
        assert self.task is not None, "the load was not started"
        assert self.task.done(), "the load is not done"
        return self.task.result()

    async def progress_until_done(self) -> AsyncIterator[LoadProgress]:
        """Give the present progress at intervals until the load is done."""
        assert self.task is not None, "the load was not started"
        while not self.task.done():
            await asyncio.wait({self.task}, timeout=_PROGRESS_INTERVAL_SECONDS)
            progress = self._progress
            if progress.total_bytes and not self.task.done():
                self._log_progress(progress)
                yield progress

    def _log_progress(self, progress: LoadProgress) -> None:
        # Several callers may wait, and a slow stage reports nothing new.
        if progress == self._logged:
            return
        self._logged, done, total = progress, progress.loaded_bytes, progress.total_bytes
        _log.info(
            f"loading {self._model_name}: {progress.description}, {100 * done // total} % "
            f"({done // 10**6} of {total // 10**6} MB)",
            loaded_bytes=done,
            total_bytes=total,
        )


class _StepStream:
    """One open stream of steps, which another may end."""

    def __init__(self) -> None:
        # Steps in the order in which they came, computed or to be computed; None after the last. While it is full
        # more steps wait in gRPC's flow-controlled buffer.
        self._submitted: asyncio.Queue[_RunningStep | None] = asyncio.Queue(_MAX_SUBMITTED_STEPS)
        self._error: OctavoError | None = None

    def end(self, error: OctavoError) -> None:
        """End the stream from outside: no step of it begins any more, and who waits for one is told."""
        self.forbid(error)
        while not self._submitted.empty():
            waiting = self._submitted.get_nowait()
            if waiting is not None:
                waiting.cancel()
        self._submitted.put_nowait(None)

    def forbid(self, error: OctavoError) -> None:
        """Let no further step run; may be called from any thread. The first error stays."""
        self._error = self._error or error

    def raise_if_ended(self) -> None:
        """Raise why no step may run any more; may be called from any thread."""
        if self._error is not None:
            raise self._error

    async def submit(self, step: _RunningStep | None) -> None:
        """Add a step, or None after the last, when there is room."""
        await self._submitted.put(step)

    async def next_submitted(self) -> _RunningStep | None:
        """Return the next step, or None when the engine has no more; raises why it was ended."""
        step = await self._submitted.get()
        if step is None:
            self.raise_if_ended()
        return step


def registration(servicer: WorkerServicer) -> Registration:
    """Say how the service is added to a server."""
    return Registration(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, SERVICE_NAME)
