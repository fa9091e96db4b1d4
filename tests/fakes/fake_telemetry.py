"""A telemetry tier that speaks the real protocol and keeps records in a list, once for each batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from libs.errors import OctavoError
from libs.protogen.telemetry.v1 import telemetry_pb2, telemetry_pb2_grpc
from libs.rpc import Registration, abort_with, make_server
from tests.patience import PATIENCE_SECONDS


@dataclass(slots=True)
class FakeTelemetry:
    """Keeps what it is sent."""

    records: list[telemetry_pb2.RequestRecord] = field(default_factory=list)
    batch_ids: list[str] = field(default_factory=list)
    # Answers with this error: before a batch is kept, or after, as when an acknowledgement is lost.
    error: OctavoError | None = None
    keeps_before_error: bool = False
    address: str = ""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _server: Any = None

    async def start(self, address: str = "127.0.0.1:0") -> None:
        """Listen."""
        registration = Registration(
            telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server,
            _Telemetry(self),
            "octavo.telemetry.v1.TelemetryService",
        )
        self._server = make_server(address, [registration])
        await self._server.start()
        self.address = self._server.address

    async def stop(self) -> None:
        """Go away at once."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def wait_for(self, request_id: str) -> telemetry_pb2.RequestRecord:
        """Wait for the record of a request; fails after a generous time."""
        await self.wait_until_count(lambda: any(record.request_id == request_id for record in self.records))
        return next(record for record in self.records if record.request_id == request_id)

    async def wait_until_count(self, condition: Any) -> None:
        """Wait until the records make ``condition`` true; fails after a generous time."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def error_for(self, request: telemetry_pb2.IngestEventsRequest) -> OctavoError | None:
        """Return the error to answer a batch with."""
        return self.error

    def keep(self, request: telemetry_pb2.IngestEventsRequest) -> bool:
        """Keep a batch unless it is known; returns whether it was."""
        is_duplicate = request.batch_id in self.batch_ids
        if not is_duplicate:
            self.records.extend(request.records)
        self.batch_ids.append(request.batch_id)
        self._changed.set()
        return is_duplicate


class _Telemetry(telemetry_pb2_grpc.TelemetryServiceServicer):
    def __init__(self, telemetry: FakeTelemetry) -> None:
        self._telemetry = telemetry

    async def IngestEvents(
        self, request: telemetry_pb2.IngestEventsRequest, context: Any
    ) -> telemetry_pb2.IngestEventsResponse:
        error = self._telemetry.error_for(request)
        if error is not None and not self._telemetry.keeps_before_error:
            await abort_with(context, error)
        is_duplicate = self._telemetry.keep(request)
        if error is not None:
            await abort_with(context, error)
        return telemetry_pb2.IngestEventsResponse(is_duplicate=is_duplicate)
