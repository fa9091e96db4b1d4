"""A router that speaks the real protocol and places every request on the engine that it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from libs.errors import OctavoError
from libs.protogen.router.v1 import router_pb2, router_pb2_grpc
from libs.rpc import Registration, make_server, status_from_error
from tests.fakes.fake_generation_engine import FakeGenerationEngine
from tests.patience import PATIENCE_SECONDS


@dataclass(slots=True)
class FakeRouter:
    """Places requests on its engines in turn, leaving out those excluded."""

    engines: list[FakeGenerationEngine]
    # Answers with this error instead of a place.
    refusal: OctavoError | None = None
    # Takes requests and does not answer.
    holds: bool = False
    enqueues: list[router_pb2.Enqueue] = field(default_factory=list)
    started_ids: list[str] = field(default_factory=list)
    finished_ids: list[str] = field(default_factory=list)
    cancelled_ids: list[str] = field(default_factory=list)
    address: str = ""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: Any = None

    async def start(self, address: str = "127.0.0.1:0") -> None:
        """Listen."""
        registration = Registration(
            router_pb2_grpc.add_RouterServiceServicer_to_server, _Router(self), "octavo.router.v1.RouterService"
        )
        self._server = make_server(address, [registration])
        await self._server.start()
        self.address = self._server.address

    async def stop(self) -> None:
        """Go away at once."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that the router saw makes ``condition`` true; fails after a generous time."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def answer(self, enqueue: router_pb2.Enqueue) -> router_pb2.PlaceRequestsResponse | None:
        """Place a request or refuse it."""
        self.enqueues.append(enqueue)
        if self.holds:
            return None
        if self.refusal is not None:
            rejected = router_pb2.Rejected(request_id=enqueue.request_id, status=status_from_error(self.refusal))
            return router_pb2.PlaceRequestsResponse(rejected=rejected)
        candidates = [engine for engine in self.engines if engine.engine_id not in enqueue.excluded_engine_ids]
        engine = (candidates or self.engines)[len(self.enqueues) % len(candidates or self.engines)]
        placed = router_pb2.Placed(
            request_id=enqueue.request_id, engine_id=engine.engine_id, address=engine.address, incarnation=1
        )
        return router_pb2.PlaceRequestsResponse(placed=placed)

    def note(self, message: router_pb2.PlaceRequestsRequest) -> None:
        """Keep what a gateway said."""
        if message.HasField("started"):
            self.started_ids.append(message.started.request_id)
        elif message.HasField("finished"):
            self.finished_ids.append(message.finished.request_id)
        elif message.HasField("cancelled"):
            self.cancelled_ids.append(message.cancelled.request_id)
        self._changed.set()


class _Router(router_pb2_grpc.RouterServiceServicer):
    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    async def PlaceRequests(
        self, request_iterator: AsyncIterator[router_pb2.PlaceRequestsRequest], context: Any
    ) -> AsyncIterator[router_pb2.PlaceRequestsResponse]:
        async for message in request_iterator:
            if message.HasField("enqueue"):
                answer = self._router.answer(message.enqueue)
                if answer is not None:
                    yield answer
            self._router.note(message)

    async def ListEngines(
        self, request: router_pb2.ListEnginesRequest, context: Any
    ) -> router_pb2.ListEnginesResponse:
        statuses = [
            router_pb2.EngineStatus(engine=engine.engine(), load=engine.load(), is_watched=True)
            for engine in self._router.engines
        ]
        return router_pb2.ListEnginesResponse(engines=statuses)
