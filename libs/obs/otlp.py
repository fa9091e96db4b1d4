"""Spans sent to an OTLP endpoint by OpenTelemetry's SDK.

Owns how the SDK is set up. It sends from a thread of its own; what does not fit into its queue while the endpoint
is away is dropped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from libs.obs.logs import get_logger
from libs.obs.tracing import Attributes, Span, SpanEvent, SpanKind

_log = get_logger("tracing")

_MAX_QUEUED_SPANS: Final = 8_192
_SEND_INTERVAL_MILLIS: Final = 1_000
_SEND_TIMEOUT_SECONDS: Final = 2.0
# Less than any tier may take to end. A full queue takes part of a second where somebody takes it.
_CLOSE_SECONDS: Final = 2.0
# Between two events that tell that spans were not sent.
_QUIET_SECONDS: Final = 60.0
_KINDS: Final = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}
_CONTEXT: Final = TraceContextTextMapPropagator()


class OtlpTracer:
    """Begins spans that are sent to one endpoint."""

    def __init__(self, endpoint: str, *, tier: str, instance_id: str, sample_fraction: float) -> None:
        _tell_of_failures()
        resource = Resource.create(
            {"service.namespace": "octavo", "service.name": f"octavo-{tier}", "service.instance.id": instance_id}
        )
        # Who calls decides for the whole trace; the fraction is for those who come without one.
        sampler = ParentBased(TraceIdRatioBased(sample_fraction))
        self._exporter = OTLPSpanExporter(
            endpoint, insecure=not endpoint.startswith("https://"), timeout=_SEND_TIMEOUT_SECONDS
        )
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter, max_queue_size=_MAX_QUEUED_SPANS, schedule_delay_millis=_SEND_INTERVAL_MILLIS
            )
        )
        self._tracer = self._provider.get_tracer("octavo")

    def start(
        self,
        name: str,
        *,
        traceparent: str | None,
        start_ns: int,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
    ) -> Span:
        """Begin a span below ``traceparent``, or one that has no parent."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        span = self._tracer.start_span(
            name,
            context=_CONTEXT.extract(carrier),
            kind=_KINDS[kind],
            attributes=attributes,
            start_time=start_ns + offset_ns,
        )
        return _OtlpSpan(span, offset_ns)

    def close(self) -> None:
        """Send what is left, for a bounded time; blocks.

        The SDK's own bound is half a minute, for which each batch waits out its time at an endpoint that is away.
        """
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracer", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            _log.warning("spans were left unsent", waited_seconds=_CLOSE_SECONDS)
            # From now on every batch fails at once, and so the thread ends.
            self._exporter.shutdown()


class _OtlpSpan:
    """A span of the SDK's, on our clock: the offset is that between the wall's and the monotonic one."""

    def __init__(self, span: trace.Span, offset_ns: int) -> None:
        self._span = span
        self._offset_ns = offset_ns

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    @property
    def traceparent(self) -> str | None:
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, trace.set_span_in_context(self._span))
        return carrier.get("traceparent")

    def end(
        self,
        end_ns: int,
        attributes: Attributes | None = None,
        *,
        events: Sequence[SpanEvent] = (),
        error: str | None = None,
    ) -> None:
        self._span.set_attributes(attributes or {})
        for event in events:
            self._span.add_event(event.name, event.attributes, event.time_ns + self._offset_ns)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR))
        self._span.end(end_ns + self._offset_ns)


class _FailureLog(logging.Handler):
    """Tells of the SDK's warnings in our log, where they would be lines of another shape.

    While an endpoint is away there is one for each second; so many say no more than one a minute.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._quiet_until = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        now = self._monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _QUIET_SECONDS
            _log.warning("spans were not sent", detail=record.getMessage())


def _tell_of_failures() -> None:
    logger = logging.getLogger("opentelemetry")
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(_FailureLog())
