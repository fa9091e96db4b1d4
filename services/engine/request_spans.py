"""A request's spans on the engine: its wait, its prefill and its decode, below the span of whoever asked.

Owns their names and attributes. They are made at the end, from durations of the engine's clock.
"""

from __future__ import annotations

import time

from libs.obs.tracing import Span, SpanKind, Tracer
from services.engine.core.request import SequenceEnd, Usage

_NANOS_PER_SECOND = 1_000_000_000


class RequestSpans:
    """Makes the spans of sequences that have ended."""

    def __init__(self, tracer: Tracer, engine_id: str) -> None:
        self._tracer = tracer
        self._engine_id = engine_id

    def note(self, end: SequenceEnd) -> None:
        """Take an end; one whose request is not traced makes no spans."""
        if end.traceparent is None:
            return
        usage, now_ns = end.usage, time.monotonic_ns()
        decode_ns, prefill_ns, queue_ns = (
            round(seconds * _NANOS_PER_SECOND)
            for seconds in (usage.decode_seconds, usage.prefill_seconds, usage.queue_seconds)
        )
        scheduled_ns = now_ns - decode_ns - prefill_ns
        span = self._tracer.start(
            "octavo.engine.generate",
            traceparent=end.traceparent,
            start_ns=scheduled_ns - queue_ns,
            kind=SpanKind.SERVER,
            attributes={"octavo.request_id": end.request_id, "octavo.engine_id": self._engine_id},
        )
        if span.is_recording:
            self._part(span, "octavo.engine.queue", scheduled_ns - queue_ns, scheduled_ns)
            self._part(span, "octavo.engine.prefill", scheduled_ns, now_ns - decode_ns)
            self._part(span, "octavo.engine.decode", now_ns - decode_ns, now_ns)
        span.end(
            now_ns,
            _attributes(end, usage),
            error=None if end.error is None else type(end.error).__name__,
        )

    def _part(self, parent: Span, name: str, start_ns: int, end_ns: int) -> None:
        self._tracer.start(name, traceparent=parent.traceparent, start_ns=start_ns).end(end_ns)


def _attributes(end: SequenceEnd, usage: Usage) -> dict[str, str | int]:
    return {
        "octavo.handle": end.handle,
        "octavo.finish_reason": "error" if end.reason is None else end.reason.value,
        "octavo.cached_tokens": usage.num_cached_tokens,
        "octavo.computed_tokens": usage.num_computed_tokens,
        "octavo.output_tokens": usage.num_output_tokens,
        "octavo.preemptions": usage.num_preemptions,
        "octavo.stalls": usage.num_stalls,
    }
