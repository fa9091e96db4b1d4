"""RouterService over gRPC: one stream for each gateway, and the listing of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from libs.errors import Draining, InvalidRequest, OctavoError, Overloaded
from libs.obs import get_logger
from libs.protogen.router.v1 import router_pb2, router_pb2_grpc
from libs.rpc import Registration, abort_with
from services.router.engine_directory import EngineDirectory
from services.router.placement import Answer, GatewayId, Placement, Rejected
from services.router.wire import answer_to_wire, placement_request_from_wire, status_to_wire

_log = get_logger("servicer")


class GatewayStream:
    """Answers on their way to one gateway; one that does not read them is cut off."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._answers: list[Answer] = []
        self._changed = asyncio.Event()
        self._has_ended = False
        self.error: OctavoError | None = None

    def deliver(self, answer: Answer) -> None:
        """Queue an answer."""
        if len(self._answers) >= self._max_answers:
            self.end(Overloaded(f"The gateway left {self._max_answers} answers unread.", retry_after_seconds=1.0))
            return
        self._answers.append(answer)
        self._changed.set()

    def end(self, error: OctavoError | None) -> None:
        """End the stream once the queued answers are written; the first reason counts."""
        if not self._has_ended:
            self._has_ended, self.error = True, error
            self._changed.set()

    async def take(self) -> list[Answer]:
        """Wait for answers and take all that are queued; none means that the stream has ended."""
        while not self._answers and not self._has_ended:
            self._changed.clear()
            await self._changed.wait()
        answers, self._answers = self._answers, []
        return answers


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Serves gateways and operators."""

    def __init__(self, placement: Placement, directory: EngineDirectory, *, max_answers: int) -> None:
        self._placement = placement
        self._directory = directory
        self._max_answers = max_answers
        self._streams: set[GatewayStream] = set()

    # The generated base class knows handlers that are generators. This one writes itself: a generator that is
    # cancelled while grpc.aio writes its last answer would be finalized only when it is collected.
    async def PlaceRequests(  # type: ignore[override]
        self, request_iterator: AsyncIterator[router_pb2.PlaceRequestsRequest], context: Any
    ) -> None:
        """Serve one gateway until its stream ends, then give back what it held."""
        stream = GatewayStream(self._max_answers)
        gateway_id = self._placement.open_gateway(stream)
        self._streams.add(stream)
        _log.info("gateway connected", gateway=gateway_id, peer=context.peer())
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(gateway_id, request_iterator, stream))
                while answers := await stream.take():
                    for answer in answers:
                        await context.write(answer_to_wire(answer))
                reader.cancel()
        finally:
            self._streams.discard(stream)
            self._placement.close_gateway(gateway_id)
            _log.info("gateway disconnected", gateway=gateway_id)
        if stream.error is not None:
            await abort_with(context, stream.error)

    async def ListEngines(
        self, request: router_pb2.ListEnginesRequest, context: Any
    ) -> router_pb2.ListEnginesResponse:
        """Return the engines by id."""
        return router_pb2.ListEnginesResponse(engines=map(status_to_wire, self._directory.statuses()))

    def drain(self) -> None:
        """End all streams after the answers that are queued."""
        for stream in self._streams:
            stream.end(Draining("This router is going away; ask another.", retry_after_seconds=1.0))

    async def _read(
        self,
        gateway_id: GatewayId,
        request_iterator: AsyncIterator[router_pb2.PlaceRequestsRequest],
        stream: GatewayStream,
    ) -> None:
        try:
            async for message in request_iterator:
                self._take(gateway_id, message, stream)
        except InvalidRequest as error:
            stream.end(error)
        else:
            stream.end(None)

    def _take(self, gateway_id: GatewayId, message: router_pb2.PlaceRequestsRequest, stream: GatewayStream) -> None:
        match message.WhichOneof("message"):
            case "enqueue":
                self._enqueue(gateway_id, message.enqueue, stream)
            case "started":
                self._placement.start(gateway_id, message.started.request_id)
            case "finished":
                self._placement.finish(gateway_id, message.finished.request_id)
            case "cancelled":
                self._placement.cancel(gateway_id, message.cancelled.request_id)
            case other:
                raise InvalidRequest(f"The gateway sent a message that this router does not know: {other}.")

    def _enqueue(self, gateway_id: GatewayId, message: router_pb2.Enqueue, stream: GatewayStream) -> None:
        try:
            request = placement_request_from_wire(message)
        except InvalidRequest as error:
            stream.deliver(Rejected(message.request_id, error))
        else:
            self._placement.enqueue(gateway_id, request)


def registration(servicer: RouterServicer) -> Registration:
    """Return the router's service for a server."""
    return Registration(
        router_pb2_grpc.add_RouterServiceServicer_to_server, servicer, "octavo.router.v1.RouterService"
    )
