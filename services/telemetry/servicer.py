"""octavo.telemetry.v1.TelemetryService: the edge between the wire and the audit pipeline."""

from __future__ import annotations

import grpc.aio

from libs.errors import OctavoError
from libs.protogen.telemetry.v1 import telemetry_pb2, telemetry_pb2_grpc
from libs.rpc import Registration, abort_with
from services.telemetry.audit_pipeline import AuditPipeline
from services.telemetry.wire import batch_from_wire


class TelemetryServicer(telemetry_pb2_grpc.TelemetryServiceServicer):
    """Answers telemetry calls."""

    def __init__(self, pipeline: AuditPipeline) -> None:
        self._pipeline = pipeline

    async def IngestEvents(  # The name is the rpc's.
        self, request: telemetry_pb2.IngestEventsRequest, context: grpc.aio.ServicerContext
    ) -> telemetry_pb2.IngestEventsResponse:
        """Take a batch of records; answer when they are durable."""
        try:
            is_new = await self._pipeline.take(batch_from_wire(request))
        except OctavoError as error:
            await abort_with(context, error)
        return telemetry_pb2.IngestEventsResponse(is_duplicate=not is_new)


def telemetry_registration(pipeline: AuditPipeline) -> Registration:
    """Register the service for `libs.rpc.make_server`."""
    return Registration(
        telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server,
        TelemetryServicer(pipeline),
        telemetry_pb2.DESCRIPTOR.services_by_name["TelemetryService"].full_name,
    )
