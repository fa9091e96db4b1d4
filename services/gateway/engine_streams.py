"""One long-lived Generate stream for each engine, shared by all requests of this gateway.

Owns opening and losing streams, and which request a handle stands for. It must not know text, HTTP or why an
engine was chosen. Every request that was submitted gets exactly one end, also when its stream breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libs.errors import EngineLost, InternalError, OctavoError, Overloaded, UnavailableError
from libs.obs import get_logger
from services.gateway.clients import GenerationCall, GenerationClient
from services.gateway.generation import (
    FinishReason,
    GenerationEnd,
    GenerationFailed,
    GenerationFinished,
    GenerationStep,
    StepEvents,
    Submission,
)

log = get_logger("engine_streams")


class EngineRequest:
    """One request on an engine, as its reader sees it.

    Tokens that the reader has not taken are merged, so that a slow reader costs memory for the token ids
    alone, of which there are at most the request's output limit.
    """

    def __init__(self, request_id: str, on_abort: Callable[[EngineRequest], None]) -> None:
        self.request_id = request_id
        self.num_received_tokens = 0
        self.end: GenerationEnd | None = None
        self._on_abort = on_abort
        self._is_aborted = False
        self._pending_token_ids: list[int] = []
        self._is_end_taken = False
        self._accepted = asyncio.Event()
        self._news = asyncio.Event()

    async def wait_accepted(self) -> None:
        """Return when the engine has taken or refused the request."""
        await self._accepted.wait()

    async def next_step(self) -> GenerationStep:
        """Wait for tokens or the end and take them; the end is given once. Safe to cancel."""
        assert not self._is_end_taken, f"{self.request_id} was read past its end"
        await self._news.wait()
        self._news.clear()
        token_ids, self._pending_token_ids = self._pending_token_ids, []
        self._is_end_taken = self.end is not None
        return GenerationStep(token_ids, self.end)

    async def wait_ended(self) -> None:
        """Return when the engine has ended the request, whatever was read of it."""
        while self.end is None:
            await self._news.wait()
            if self.end is None:
                self._news.clear()

    def abort(self) -> None:
        """Ask the engine to end the request; its end follows. Does nothing when that is on the way already."""
        if not self._is_aborted and self.end is None:
            self._is_aborted = True
            self._on_abort(self)

    def on_accepted(self) -> None:
        """The engine knows the request; called by its stream."""
        self._accepted.set()

    def on_step(self, token_ids: list[int], end: GenerationEnd | None) -> None:
        """Tokens or the end came; called by its stream."""
        if self.end is not None:
            return
        self.num_received_tokens += len(token_ids)
        self._pending_token_ids += token_ids
        if end is not None:
            self.end = self._checked(end)
        self._accepted.set()
        self._news.set()

    def _checked(self, end: GenerationEnd) -> GenerationEnd:
        """Let ``aborted`` pass only as the answer to our own abort; else the output would look whole."""
        is_aborted = isinstance(end, GenerationFinished) and end.reason is FinishReason.ABORTED
        if is_aborted and not self._is_aborted:
            return GenerationFailed(EngineLost("The engine gave the request up before it was done."), end.usage)
        return end


class EngineStreams:
    """The streams to all engines, each opened when first needed.

    ``max_requests`` bounds what one stream carries at once.
    """

    def __init__(self, *, max_requests: int, tasks: asyncio.TaskGroup) -> None:
        self._max_requests = max_requests
        self._tasks = tasks
        self._streams: dict[str, _EngineStream] = {}

    def submit(self, address: str, submission: Submission, *, remaining_seconds: float) -> EngineRequest:
        """Send a request to the engine at ``address`` and return where its tokens will come.

        Raises:
            Overloaded: the stream carries as many requests as it may.
            EngineLost: the engine has not yet ended an earlier try of the same request.
        """
        stream = self._streams.get(address)
        if stream is None:
            stream = _EngineStream(address, self._max_requests)
            self._streams[address] = stream
            self._tasks.create_task(self._run(stream))
        return stream.submit(submission, remaining_seconds)

    def close(self) -> None:
        """Break all streams; what was open on them ends as lost."""
        for stream in list(self._streams.values()):
            stream.close()

    async def _run(self, stream: _EngineStream) -> None:
        try:
            await stream.run()
        finally:
            # A later request opens a new stream; this one has ended all of its own.
            if self._streams.get(stream.address) is stream:
                del self._streams[stream.address]


class _EngineStream:
    """One Generate stream from its opening to its loss."""

    def __init__(self, address: str, max_requests: int) -> None:
        self.address = address
        self._max_requests = max_requests
        self._requests: dict[str, EngineRequest] = {}
        self._by_handle: dict[int, EngineRequest] = {}
        # A request is submitted once and aborted at most once; only a peer that takes nothing fills this.
        self._outbox: asyncio.Queue[tuple[Submission, float] | EngineRequest] = asyncio.Queue(2 * max_requests)
        self._closing = asyncio.Event()

    def submit(self, submission: Submission, remaining_seconds: float) -> EngineRequest:
        if len(self._requests) >= self._max_requests or self._outbox.full():
            raise Overloaded(
                f"The gateway has {len(self._requests)} requests on this engine already; try again shortly.",
                retry_after_seconds=1.0,
            )
        if submission.request_id in self._requests:
            raise EngineLost("The engine still holds an earlier try of the request.")
        request = EngineRequest(submission.request_id, self._send_abort)
        self._requests[submission.request_id] = request
        self._outbox.put_nowait((submission, remaining_seconds))
        return request

    def close(self) -> None:
        self._closing.set()

    def _send_abort(self, request: EngineRequest) -> None:
        try:
            self._outbox.put_nowait(request)
        except asyncio.QueueFull:
            log.warning("engine takes no commands", address=self.address)
            self.close()

    async def run(self) -> None:
        """Carry requests until the stream is lost or closed, and end what is open then."""
        loss: OctavoError = EngineLost("The engine that held the request was lost; send the request again.")
        try:
            async with GenerationClient(self.address) as client, client.open() as call:
                await self._carry(call)
        except OctavoError as error:
            if isinstance(error, UnavailableError) and not isinstance(error, EngineLost):
                # The engine's own word, as when it drains.
                loss = error
            log.warning("engine stream lost", address=self.address, error=error.message)
        except Exception as error:
            loss = InternalError("The gateway could not read the engine's stream.")
            log.exception("engine stream failed", address=self.address, error=str(error))
        finally:
            self._end_all(loss)

    async def _carry(self, call: GenerationCall) -> None:
        """Send and receive until one of both ends; a stream without an error ends by the engine's wish."""
        receiving = asyncio.create_task(self._receive(call))
        sending = asyncio.create_task(self._send(call))
        closing = asyncio.create_task(self._closing.wait())
        tasks: tuple[asyncio.Task[object], ...] = (receiving, sending, closing)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        if closing not in done:
            raise EngineLost("The engine ended its stream.")

    async def _receive(self, call: GenerationCall) -> None:
        async for events in call:
            self._dispatch(events)

    async def _send(self, call: GenerationCall) -> None:
        while True:
            command = await self._outbox.get()
            if isinstance(command, EngineRequest):
                await call.abort(command.request_id)
            else:
                submission, remaining_seconds = command
                await call.submit(submission, remaining_seconds)

    def _dispatch(self, events: StepEvents) -> None:
        for request_id, handles in events.started:
            self._start(request_id, handles)
        ends = dict(events.ends)
        offset = 0
        for handle, count in zip(events.handles, events.num_tokens, strict=True):
            token_ids = events.token_ids[offset : offset + count]
            offset += count
            request = self._by_handle.get(handle)
            if request is not None:
                request.on_step(token_ids, ends.pop(handle, None))
                if request.end is not None:
                    self._forget(handle, request)
        for handle, end in ends.items():
            request = self._by_handle.get(handle)
            if request is not None:
                request.on_step([], end)
                self._forget(handle, request)

    def _start(self, request_id: str, handles: list[int]) -> None:
        request = self._requests.get(request_id)
        if request is None:
            log.warning("engine started an unknown request", address=self.address, request_id=request_id)
            return
        if len(handles) != 1:
            request.on_step(
                [], GenerationFailed(InternalError("The engine started a wrong number of choices."), None)
            )
            self._requests.pop(request_id)
            return
        self._by_handle[handles[0]] = request
        request.on_accepted()

    def _forget(self, handle: int, request: EngineRequest) -> None:
        del self._by_handle[handle]
        self._requests.pop(request.request_id, None)

    def _end_all(self, loss: OctavoError) -> None:
        requests, self._requests = self._requests, {}
        self._by_handle.clear()
        for request in requests.values():
            request.on_step([], GenerationFailed(loss, None))
