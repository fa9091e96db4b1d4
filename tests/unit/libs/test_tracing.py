"""Spans are kept only where somebody wants them, and contexts go on in any case."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys

import pytest
import structlog.testing

from libs.obs import otlp
from libs.obs.tracers import open_tracer
from libs.obs.tracing import NO_TRACER, Tracer

_TRACE_ID, _SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def tracer() -> Tracer:
    """A tracer of which nothing is sent, because nothing is flushed."""
    return open_tracer("http://127.0.0.1:9", tier="test", instance_id="test-0", sample_fraction=0.0)


def test_without_an_endpoint_a_context_goes_on_as_it_came() -> None:
    tracer = open_tracer("", tier="test", instance_id="test-0")

    span = tracer.start("work", traceparent=f"00-{_TRACE_ID}-{_SPAN_ID}-01", start_ns=0)

    assert tracer is NO_TRACER
    assert (span.is_recording, span.traceparent) == (False, f"00-{_TRACE_ID}-{_SPAN_ID}-01")


def test_a_callers_decision_holds_whatever_the_fraction_is(tracer: Tracer) -> None:
    wanted = tracer.start("work", traceparent=f"00-{_TRACE_ID}-{_SPAN_ID}-01", start_ns=0)
    unwanted = tracer.start("work", traceparent=f"00-{_TRACE_ID}-{_SPAN_ID}-00", start_ns=0)
    undecided = tracer.start("work", traceparent=None, start_ns=0)

    assert [span.is_recording for span in (wanted, unwanted, undecided)] == [True, False, False]
    for span in (wanted, unwanted):
        assert span.traceparent is not None
        _, trace_id, span_id, _ = span.traceparent.split("-")
        assert trace_id == _TRACE_ID
        assert span_id != _SPAN_ID


def test_nobody_pays_for_a_library_that_is_not_used() -> None:
    # redis-py loads parts of the SDK where it is installed, so it is the exporter that tells.
    code = (
        "import sys, services.gateway.main, services.router.main, services.engine.main;"
        "sys.exit(any(name.startswith('opentelemetry.exporter') for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_endpoint_that_takes_nothing_does_not_keep_a_process_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take two seconds for each batch, and the queue holds sixteen."""
    monkeypatch.setattr(otlp, "_CLOSE_SECONDS", 0.1)
    with socket.socket() as listener, structlog.testing.capture_logs() as logs:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        tracer = open_tracer(endpoint, tier="test", instance_id="test-0")
        for _ in range(2_000):
            tracer.start("work", traceparent=None, start_ns=0).end(1)

        tracer.close()

    assert "spans were left unsent" in [entry["event"] for entry in logs]


def test_an_endpoint_that_stays_away_is_told_once_a_minute() -> None:
    now = 1_000.0
    handler = otlp._FailureLog(lambda: now)
    failure = logging.LogRecord("opentelemetry", logging.WARNING, "", 0, "Failed to export", None, None)

    with structlog.testing.capture_logs() as logs:
        for _ in range(3_600):
            handler.emit(failure)
            now += 1.0

    assert len(logs) == 60
    assert logs[0]["detail"] == "Failed to export"
