"""A request's spans on the gateway, and the trace context that the router and the engine go on with.

Owns names and attributes: OpenTelemetry's conventions for HTTP servers, RPC servers and generative AI where they
have a word, ``octavo.`` before the others. Spans are made from the marks of the receipt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from libs.errors import spec_of
from libs.obs.tracing import NO_TRACER, AttributeValue, Span, SpanEvent, SpanKind, Tracer
from services.gateway.accounting import RequestAccount, RequestEnd
from services.gateway.client_call import Caller
from services.gateway.engine_times import TryTimes
from services.gateway.latency_receipt import Segment
from services.gateway.request_times import RequestTimes

_PROVIDER: Final = "octavo"
_FIRST_SERVER_STATUS: Final = 500
# What a request passes once and in order, so that it is an interval.
_INTERVALS: Final = (
    Segment.AUTH,
    Segment.PARSE,
    Segment.RECORD,
    Segment.TEXT_QUEUE,
    Segment.CONSTRAINT,
    Segment.TEMPLATE,
    Segment.TOKENIZE,
    Segment.HASH,
    Segment.LIMITS,
)


class RequestSpans:
    """Begins the spans of requests."""

    def __init__(self, tracer: Tracer = NO_TRACER) -> None:
        self._tracer = tracer

    def begin(self, caller: Caller) -> RequestTrace:
        """Begin with a request whose body is not read yet; continues the client's trace."""
        is_http = not caller.route.startswith("/octavo.")
        span = self._tracer.start(
            f"POST {caller.route}" if is_http else caller.route.removeprefix("/"),
            traceparent=caller.traceparent,
            start_ns=caller.times.start_ns,
            kind=SpanKind.SERVER,
            attributes=_route_attributes(caller.route, is_http=is_http),
        )
        caller.times.is_traced = span.is_recording
        return RequestTrace(self._tracer, span, caller, is_http=is_http)


class RequestTrace:
    """The spans of one request: the server's, and below it that of the generation."""

    def __init__(self, tracer: Tracer, server: Span, caller: Caller, *, is_http: bool) -> None:
        self._tracer = tracer
        self._server = server
        self._caller = caller
        self._is_http = is_http
        self._generation: Span | None = None

    @property
    def traceparent(self) -> str | None:
        """The context for those who work for the request."""
        return (self._generation or self._server).traceparent

    def begin_generation(self, operation: str, model_name: str) -> None:
        """Begin the span of the generation, now that it is known what is asked of which model."""
        self._generation = self._tracer.start(
            f"{operation} {model_name}",
            traceparent=self._server.traceparent,
            start_ns=self._caller.times.start_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": model_name,
                "octavo.request_id": self._caller.request_id,
                "octavo.tenant_id": self._caller.tenant.tenant_id,
            },
        )

    def end(self, accounts: Sequence[RequestAccount]) -> None:
        """End all spans with the request; the first prompt's end is the request's."""
        if not self._server.is_recording:
            return
        now_ns, end = time.monotonic_ns(), accounts[0].end
        assert end is not None, "a request ends before its spans"
        error = None if end.error is None else spec_of(end.error).reason.value
        if self._generation is not None:
            self._record_parts(self._generation, now_ns)
            attributes = _generation_attributes(self._caller.times, accounts, end)
            self._generation.end(now_ns, attributes, events=self._events(), error=error)
        status: dict[str, AttributeValue] = {}
        if self._is_http and end.http_status:
            status["http.response.status_code"] = end.http_status
        # To a client's own mistake the convention gives no error on the server's side.
        is_ours = end.http_status >= _FIRST_SERVER_STATUS or (error is not None and not end.http_status >= 400)
        self._server.end(now_ns, status, error=error if is_ours else None)

    def _record_parts(self, parent: Span, now_ns: int) -> None:
        times = self._caller.times
        for segment, (start_ns, end_ns) in times.intervals(_INTERVALS).items():
            self._record(parent, f"octavo.{segment.value}", start_ns, end_ns)
        for journey in times.journeys:
            if journey.asked_ns is not None:
                placed_ns = journey.asked_ns + journey.placement_ns
                self._record(parent, f"octavo.{Segment.ROUTER_QUEUE.value}", journey.asked_ns, placed_ns)
            if journey.current is not None:
                self._record_try(parent, journey.current, now_ns)
            for resumption in journey.resumptions:
                end_ns = now_ns if resumption.first_arrival_ns is None else resumption.first_arrival_ns
                self._record(parent, f"octavo.{Segment.RESUME.value}", resumption.lost_ns, end_ns)

    def _record_try(self, parent: Span, times: TryTimes, now_ns: int) -> None:
        begun_ns = now_ns if times.first_arrival_ns is None else times.first_arrival_ns
        self._record(parent, "octavo.first_token_wait", times.submitted_ns, begun_ns)
        if times.first_arrival_ns is not None:
            self._record(parent, "octavo.answer", begun_ns, now_ns)

    def _record(self, parent: Span, name: str, start_ns: int, end_ns: int) -> None:
        self._tracer.start(name, traceparent=parent.traceparent, start_ns=start_ns).end(end_ns)

    def _events(self) -> list[SpanEvent]:
        arrivals = [journey.current.first_arrival_ns for journey in self._caller.times.journeys if journey.current]
        return [SpanEvent("first_token", arrival_ns) for arrival_ns in arrivals if arrival_ns is not None]


def _route_attributes(route: str, *, is_http: bool) -> dict[str, AttributeValue]:
    if is_http:
        return {"http.request.method": "POST", "http.route": route, "url.path": route, "url.scheme": "http"}
    service, _, method = route.removeprefix("/").partition("/")
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}


def _generation_attributes(
    times: RequestTimes, accounts: Sequence[RequestAccount], end: RequestEnd
) -> dict[str, AttributeValue]:
    receipt = times.receipt()
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.model": accounts[0].model_name,
        "gen_ai.response.finish_reasons": [end.status.value],
        "gen_ai.usage.input_tokens": sum(account.num_prompt_tokens for account in accounts),
        "gen_ai.usage.output_tokens": sum(account.num_completion_tokens for account in accounts),
        "octavo.retries": receipt.num_retries,
        "octavo.wall_us": receipt.wall_ns // 1_000,
        "octavo.unattributed_us": receipt.unattributed_ns // 1_000,
    }
    for segment, duration_ns in receipt.segments_ns.items():
        attributes[f"octavo.segment.{segment.value}_us"] = duration_ns // 1_000
    return attributes
