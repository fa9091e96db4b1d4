"""An OTLP endpoint that keeps the spans that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.patience import PATIENCE_SECONDS


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    event_names: list[str]
    has_error: bool


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """The endpoint; ``spans`` has what came so far."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.endpoint = ""
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> OtlpReceiver:
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # Generated without types.
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def Export(self, request: Any, context: Any) -> Any:
        """Take a batch."""
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_received(service, span) for span in scope.spans]
        self._changed.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, condition: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """Wait until the spans meet a condition; returns them."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition(self.spans):
                self._changed.clear()
                await self._changed.wait()
        return self.spans


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        event_names=[event.name for event in span.events],
        has_error=span.status.code == 2,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
