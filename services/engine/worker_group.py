"""The workers of one replica: loading the model on all ranks, and sending them steps."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from libs.errors import InternalError, OctavoError, WorkerLost
from libs.obs import get_logger
from services.engine.clients import StepStream, WorkerClient
from services.engine.core.scheduler_output import SchedulerOutput, StepResult
from services.engine.identity import LoadedModel

_log = get_logger("worker_group")

_NO_GROUP = ""  # of a lone rank
# More than can be in flight: a worker that answers more has lost its way.
_MAX_UNREAD_RESULTS = 4


ResultT = TypeVar("ResultT")


class StepRunner:
    """Open step streams to all ranks; made by ``WorkerGroup.open_steps``.

    A reader for each rank runs all the time, so that a worker that dies while nothing is computed is noticed.
    """

    def __init__(self, streams: Sequence[StepStream], timeout_seconds: float, on_lost: Callable[[], None]) -> None:
        self._streams = streams
        self._timeout_seconds = timeout_seconds
        self._on_lost = on_lost
        # None only wakes the one who waits: a stream has broken.
        self._results: asyncio.Queue[StepResult | None] = asyncio.Queue(_MAX_UNREAD_RESULTS)
        self._lost: OctavoError | None = None

    async def send(self, output: SchedulerOutput) -> None:
        """Send a step to all ranks without waiting for its result; raises WorkerLost."""
        self.raise_if_lost()
        async with self._bounded("Sending a step"):
            for stream in self._streams:
                await stream.send(output)

    async def beat(self) -> None:
        """Send a step that computes nothing and wait for its answer; raises WorkerLost.

        Only a round trip through the worker's own loop shows that it is alive and not merely connected. Rank 0
        answers when it has met the other ranks.
        """
        self.raise_if_lost()
        async with self._bounded("Sending a step"):
            for stream in self._streams:
                await stream.send_empty()
        await self.next_result()

    async def next_result(self) -> StepResult:
        """Return rank 0's result of the oldest step that was sent; raises WorkerLost."""
        async with self._bounded("A step"):
            result = await self._results.get()
        if result is None:
            self.raise_if_lost()
        assert result is not None, "woken without a result and without a loss"
        return result

    def raise_if_lost(self) -> None:
        """Raise WorkerLost when a stream has broken."""
        if self._lost is not None:
            raise self._lost

    async def read(self, rank: int) -> None:
        """Read one rank's results until its stream ends; only rank 0 answers."""
        try:
            async for result in self._streams[rank]:
                self._results.put_nowait(result)
            self._note_loss(WorkerLost(f"The worker of rank {rank} ended its stream."))
        except asyncio.QueueFull:
            self._note_loss(WorkerLost(f"The worker of rank {rank} answered a step that was not sent."))
        except OctavoError as error:
            self._note_loss(error if isinstance(error, WorkerLost) else WorkerLost(error.message))
        except Exception as error:
            # As of a worker of another version: to wait for more of its answers would only take longer.
            _log.exception("worker's answer cannot be read", rank=rank)
            self._note_loss(WorkerLost(f"An answer of rank {rank} cannot be read: {type(error).__name__}: {error}"))

    @asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                yield
        except TimeoutError:
            raise WorkerLost(f"{what} took longer than {self._timeout_seconds:g} seconds.") from None

    def _note_loss(self, error: WorkerLost) -> None:
        if self._lost is None:
            self._lost = error
        if not self._results.full():
            self._results.put_nowait(None)
        self._on_lost()


class WorkerGroup:
    """One worker for each rank."""

    def __init__(
        self, workers: Sequence[WorkerClient], *, load_timeout_seconds: float, step_timeout_seconds: float
    ) -> None:
        self._workers = workers
        self._load_timeout_seconds = load_timeout_seconds
        self._step_timeout_seconds = step_timeout_seconds

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._workers)

    async def load_model(self) -> LoadedModel:
        """Load on all ranks at once; the smallest rank's blocks count for all.

        Raises:
            WorkerLost: a worker cannot be reached or broke off.
            ModelLoadFailed: the model cannot be served.
        """
        try:
            async with asyncio.timeout(self._load_timeout_seconds):
                models = await self._load_all()
        except TimeoutError:
            raise WorkerLost(f"Loading took longer than {self._load_timeout_seconds:g} seconds.") from None
        if len({(model.tokenizer_digest, model.vocab_size, model.block_size) for model in models}) != 1:
            raise InternalError("The workers of one replica have loaded different models.")
        return min(models, key=lambda model: model.num_blocks)

    async def _load_all(self) -> list[LoadedModel]:
        if self.size == 1:
            return [await self._workers[0].load_model(_NO_GROUP)]
        # A rank that loads would wait for one that is not there, and would have to load again with that.
        await _all_of(worker.check() for worker in self._workers)
        # Another for each try, so that nobody comes into a group that others have given up.
        group_id = uuid.uuid4().hex
        return await _all_of(worker.load_model(group_id) for worker in self._workers)

    @asynccontextmanager
    async def open_steps(self, on_lost: Callable[[], None]) -> AsyncIterator[StepRunner]:
        """Open step streams to all ranks; ``on_lost`` is called when one breaks."""
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(worker.open_steps()) for worker in self._workers]
            runner = StepRunner(streams, self._step_timeout_seconds, on_lost)
            readers = [asyncio.create_task(runner.read(rank)) for rank in range(len(streams))]
            try:
                yield runner
            finally:
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)


async def _all_of(calls: Iterable[Coroutine[None, None, ResultT]]) -> list[ResultT]:
    """Return what all calls return; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
