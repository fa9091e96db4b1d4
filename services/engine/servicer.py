"""The engine's gRPC services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio

from libs.errors import InternalError, OctavoError
from libs.obs import get_logger
from libs.protogen.engine.v1 import engine_pb2, engine_pb2_grpc
from libs.protogen.generation.v1 import generation_pb2, generation_pb2_grpc
from libs.rpc import Registration, abort_with, duration_from_seconds
from services.engine import wire
from services.engine.loop import EngineLoop
from services.engine.outbox import Outbox

_log = get_logger("servicer")


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Carries a gateway's requests to the loop and the loop's events back."""

    def __init__(self, loop: EngineLoop, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._clock = clock

    async def Generate(
        self,
        request_iterator: AsyncIterator[generation_pb2.GenerateRequest],
        context: grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Serve one gateway until it leaves; its open requests are aborted then."""
        owner, outbox = self._loop.open_owner()
        stamps = _SendStamps()
        reader = asyncio.create_task(self._read(request_iterator, owner, outbox, stamps))
        try:
            async for outgoing in outbox:
                if stamps.has_any:
                    stamps.note_sent(outgoing, self._clock())
                yield outgoing.message
        finally:
            reader.cancel()
            self._loop.close_owner(owner)
        if outbox.error is not None:
            await abort_with(context, outbox.error)

    async def _read(
        self,
        requests: AsyncIterator[generation_pb2.GenerateRequest],
        owner: int,
        outbox: Outbox[wire.Outgoing],
        stamps: _SendStamps,
    ) -> None:
        try:
            async for message in requests:
                if message.WhichOneof("command") == "submit":
                    now = self._clock()
                    request = wire.request_from_submit(message.submit, owner=owner, now=now)
                    if request.stall_bound_seconds is not None:
                        stamps.note_received(request.request_id, now)
                    self._loop.submit(owner, request)
                elif message.WhichOneof("command") == "abort":
                    self._loop.abort(owner, message.abort.request_id, tuple(message.abort.handles))
            outbox.close()
        except OctavoError as error:
            outbox.close(error)
        except Exception as error:
            # A stream that nobody reads any more must not look alive.
            _log.exception("gateway's stream failed", error=str(error))
            outbox.close(InternalError("The engine could not read the gateway's stream."))


class _SendStamps:
    """When what a gateway wants the timings of was read and handed to its stream, until its first token or its end.

    A request is noted as long as it is open, so there are as many as the scheduler takes.
    """

    def __init__(self) -> None:
        self._received: dict[str, float] = {}
        self._started: dict[int, float] = {}

    @property
    def has_any(self) -> bool:
        """Whether a message may have to be stamped."""
        return bool(self._received or self._started)

    def note_received(self, request_id: str, now: float) -> None:
        """A submit was read."""
        self._received[request_id] = now

    def note_sent(self, outgoing: wire.Outgoing, now: float) -> None:
        """Write into a message that is handed to the stream how long it took until now."""
        message = outgoing.message
        for started in message.started:
            received_time = self._received.pop(started.request_id, None)
            if received_time is not None:
                started.accept_duration.CopyFrom(duration_from_seconds(now - received_time))
                self._started.update(dict.fromkeys(started.handles, now))
        for first in message.first_tokens:
            assert outgoing.applied_time is not None, "a first token comes with a step"
            first.publish_duration.CopyFrom(duration_from_seconds(now - outgoing.applied_time))
            started_time = self._started.pop(first.handle, None)
            if started_time is not None:
                first.since_started_duration.CopyFrom(duration_from_seconds(now - started_time))
        for finished in message.finished:
            self._started.pop(finished.handle, None)
        for failed in message.failed:
            self._started.pop(failed.handle, None)


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Tells who the engine is and how it fares."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def GetEngine(
        self,
        request: engine_pb2.GetEngineRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetEngineRequest, engine_pb2.GetEngineResponse],
    ) -> engine_pb2.GetEngineResponse:
        """Return identity and load."""
        status = self._loop.status
        return engine_pb2.GetEngineResponse(engine=wire.engine_message(status), load=wire.load_message(status))

    async def GetPageTable(
        self,
        request: engine_pb2.GetPageTableRequest,
        context: grpc.aio.ServicerContext[engine_pb2.GetPageTableRequest, engine_pb2.GetPageTableResponse],
    ) -> AsyncIterator[engine_pb2.GetPageTableResponse]:
        """Send the rows as they are now."""
        for message in wire.page_table_messages(self._loop.page_table(request.request_id)):
            yield message

    async def DrainEngine(
        self,
        request: engine_pb2.DrainEngineRequest,
        context: grpc.aio.ServicerContext[engine_pb2.DrainEngineRequest, engine_pb2.DrainEngineResponse],
    ) -> engine_pb2.DrainEngineResponse:
        """Take no new requests from now on."""
        self._loop.drain()
        return engine_pb2.DrainEngineResponse(num_requests=self._loop.num_requests)

    async def WatchEngine(
        self,
        request: engine_pb2.WatchEngineRequest,
        context: grpc.aio.ServicerContext[engine_pb2.WatchEngineRequest, engine_pb2.WatchEngineResponse],
    ) -> AsyncIterator[engine_pb2.WatchEngineResponse]:
        """Send a snapshot, then changes, until the watcher leaves or falls behind."""
        outbox = self._loop.watch()
        try:
            async for event in outbox:
                for message in wire.watch_messages(event):
                    yield message
        finally:
            self._loop.unwatch(outbox)
        if outbox.error is not None:
            await abort_with(context, outbox.error)


def registrations(loop: EngineLoop, clock: Callable[[], float]) -> list[Registration]:
    """Return the services of an engine."""
    return [
        Registration(
            generation_pb2_grpc.add_GenerationServiceServicer_to_server,
            GenerationServicer(loop, clock),
            "octavo.generation.v1.GenerationService",
        ),
        Registration(
            engine_pb2_grpc.add_EngineServiceServicer_to_server,
            EngineServicer(loop),
            "octavo.engine.v1.EngineService",
        ),
    ]
