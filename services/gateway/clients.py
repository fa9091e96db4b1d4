"""Calls to other tiers in the gateway's own types: engines, the router, telemetry.

Owns channels and stubs. It must not know why a call is made or what becomes of its answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.errors import EngineLost, OctavoError, StoreUnavailable
from libs.protogen.engine.v1 import engine_pb2, engine_pb2_grpc
from libs.protogen.generation.v1 import generation_pb2_grpc
from libs.protogen.router.v1 import router_pb2, router_pb2_grpc
from libs.protogen.telemetry.v1 import telemetry_pb2_grpc
from libs.rpc import RpcStream, make_channel, open_stream, unary
from services.gateway import wire
from services.gateway.audit_record import AuditRecord
from services.gateway.generation import StepEvents, Submission
from services.gateway.peers import EngineChoice, EngineStatus, PlacementAsk


class _Client:
    """A channel to one address, closed on leaving."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = make_channel(address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Close the channel; calls that still run after the grace are cancelled."""
        await self._channel.close(grace_seconds)


class GenerationCall:
    """An open Generate stream."""

    def __init__(self, stream: RpcStream[Any, Any]) -> None:
        self._stream = stream

    async def submit(self, submission: Submission, remaining_seconds: float) -> None:
        """Start a request."""
        await self._stream.send(wire.encode_submit(submission, remaining_seconds))

    async def abort(self, request_id: str, handles: Sequence[int]) -> None:
        """End some choices of a request, or all where none is named."""
        await self._stream.send(wire.encode_abort(request_id, handles))

    async def __aiter__(self) -> AsyncIterator[StepEvents]:
        async for message in self._stream:
            yield wire.decode_step(message)


class GenerationClient(_Client):
    """An engine's GenerationService."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[GenerationCall]:
        """Open the stream; leaving cancels it."""
        stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        async with open_stream(stub.Generate, on_lost=EngineLost) as stream:
            yield GenerationCall(stream)


class EngineClient(_Client):
    """An engine's EngineService."""

    async def get_engine(self, timeout_seconds: float) -> EngineStatus:
        """Ask an engine who it is and what it does; raises OctavoError when it does not answer."""
        stub = engine_pb2_grpc.EngineServiceStub(self._channel)
        answer = await unary(
            stub.GetEngine, engine_pb2.GetEngineRequest(), timeout_seconds=timeout_seconds, on_lost=EngineLost
        )
        return wire.decode_engine(answer.engine, answer.load, address=self.address)


class PlacementCall:
    """An open PlaceRequests stream."""

    def __init__(self, stream: RpcStream[Any, Any]) -> None:
        self._stream = stream

    async def enqueue(self, ask: PlacementAsk, remaining_seconds: float) -> None:
        """Ask for a place."""
        await self._stream.send(wire.encode_enqueue(ask, remaining_seconds))

    async def started(self, request_id: str) -> None:
        """Say that the first token came."""
        await self._stream.send(wire.encode_placement_started(request_id))

    async def finished(self, request_id: str) -> None:
        """Give a place back."""
        await self._stream.send(wire.encode_placement_finished(request_id))

    async def cancelled(self, request_id: str) -> None:
        """Withdraw an ask."""
        await self._stream.send(wire.encode_placement_cancelled(request_id))

    async def __aiter__(self) -> AsyncIterator[tuple[str, EngineChoice | OctavoError]]:
        async for message in self._stream:
            yield wire.decode_placement(message)


class RouterClient(_Client):
    """The router."""

    @asynccontextmanager
    async def open_placements(self) -> AsyncIterator[PlacementCall]:
        """Open the stream of placements; leaving cancels it."""
        stub = router_pb2_grpc.RouterServiceStub(self._channel)
        async with open_stream(stub.PlaceRequests, on_lost=StoreUnavailable) as stream:
            yield PlacementCall(stream)

    async def list_engines(self, timeout_seconds: float) -> list[EngineStatus]:
        """Ask which engines the router watches; raises OctavoError when it does not answer."""
        stub = router_pb2_grpc.RouterServiceStub(self._channel)
        answer = await unary(
            stub.ListEngines,
            router_pb2.ListEnginesRequest(),
            timeout_seconds=timeout_seconds,
            on_lost=StoreUnavailable,
        )
        return wire.decode_engines(answer)

    async def check_alive(self, timeout_seconds: float) -> None:
        """Return when the router's event loop answers at all; raises OctavoError when it does not."""
        stub = health_pb2_grpc.HealthStub(self._channel)
        await unary(
            stub.Check, health_pb2.HealthCheckRequest(), timeout_seconds=timeout_seconds, on_lost=StoreUnavailable
        )


class TelemetryClient(_Client):
    """The telemetry tier."""

    async def ingest(self, batch_id: str, records: Sequence[AuditRecord], timeout_seconds: float) -> None:
        """Hand records over; when this returns they are durable there. Raises OctavoError otherwise."""
        stub = telemetry_pb2_grpc.TelemetryServiceStub(self._channel)
        await unary(
            stub.IngestEvents,
            wire.encode_batch(batch_id, records),
            timeout_seconds=timeout_seconds,
            on_lost=StoreUnavailable,
        )
