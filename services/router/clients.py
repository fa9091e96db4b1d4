"""Calls from the router to engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from libs.errors import EngineLost
from libs.protogen.engine.v1 import engine_pb2, engine_pb2_grpc
from libs.rpc import make_channel, open_stream
from services.router.engine_events import WatchEvent
from services.router.wire import watch_event_from_wire


async def watch_engine(address: str) -> AsyncGenerator[WatchEvent, None]:
    """Yield the events of one watch until it ends; close the iterator to cancel the call.

    Each watch has a channel of its own, so that the back-off of a channel that found nobody is not waited for.

    Raises:
        EngineLost: when the engine cannot be reached or the stream breaks.
    """
    async with make_channel(address) as channel:
        method = engine_pb2_grpc.EngineServiceStub(channel).WatchEngine
        async with open_stream(method, engine_pb2.WatchEngineRequest(), on_lost=EngineLost) as stream:
            async for message in stream:
                yield watch_event_from_wire(message)
