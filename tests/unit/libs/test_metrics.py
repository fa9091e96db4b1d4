"""Metrics: their names are those of the document, and series are bounded and there from the start."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from libs.errors import InternalError
from libs.obs.metrics import (
    EngineMetrics,
    GatewayMetrics,
    RouterMetrics,
    ScrapedEngineMetrics,
    TelemetryMetrics,
    WorkerMetrics,
    render,
    serve_metrics,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
_SUFFIX = {"counter": "_total"}


def all_names() -> set[str]:
    registries = [
        tier(CollectorRegistry()).registry
        for tier in (
            GatewayMetrics,
            ScrapedEngineMetrics,
            RouterMetrics,
            EngineMetrics,
            WorkerMetrics,
            TelemetryMetrics,
        )
    ]
    return {metric.name + _SUFFIX.get(metric.type, "") for registry in registries for metric in registry.collect()}


def test_the_document_names_every_metric_and_no_other() -> None:
    told = set(re.findall(r"octavo_(?:gateway|router|engine|worker|telemetry)_\w+", DOCUMENT.read_text()))
    # A histogram is told as one metric, and read by its parts.
    told = {re.sub(r"_(sum|count|bucket)$", "", name) for name in told}

    assert told == all_names()


def test_how_requests_end_is_a_series_before_any_has_ended() -> None:
    text = GatewayMetrics(CollectorRegistry()).render().decode()

    for name in ("requests_ended", "prompt_tokens", "completion_tokens"):
        for status in ("stop", "length", "aborted", "rejected", "error"):
            assert f'octavo_gateway_{name}_total{{status="{status}"}} 0.0' in text


def test_a_port_that_is_taken_is_told_in_a_sentence() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]

        with pytest.raises(InternalError, match=f"port {port}: .*metrics_port"):
            serve_metrics(CollectorRegistry(), port)


@pytest.mark.parametrize("query", ["", "?name[]=octavo_engine_running_requests"])
def test_a_scrape_shows_what_is_now_and_not_what_was_at_the_last(query: str) -> None:
    metrics = EngineMetrics(CollectorRegistry())
    running = iter((3, 0))
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    server = serve_metrics(
        metrics.registry, port, before_scrape=lambda: metrics.running_requests.set(next(running))
    )
    assert server is not None

    shown = [urlopen(f"http://127.0.0.1:{port}/metrics{query}").read().decode() for _ in range(2)]
    server.shutdown()
    server.server_close()

    found = [re.findall(r"^octavo_engine_running_requests (\S+)$", text, re.MULTILINE) for text in shown]
    assert found == [["3.0"], ["0.0"]]


def test_an_engine_that_is_forgotten_leaves_no_series() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    for number in range(100):
        engine_id = f"pod-{number}"
        metrics.keep_engines(frozenset({engine_id, "idle"}))
        metrics.placements.labels(engine_id=engine_id).inc()

    text = render(metrics.registry).decode()

    assert re.findall(r'octavo_router_placements_total\{engine_id="([^"]*)"', text) == ["pod-99"]


@pytest.mark.parametrize(
    ("listen_address", "host"),
    [
        ("unix:/run/x.sock", "127.0.0.1"),
        ("127.0.0.1:7001", "127.0.0.1"),
        ("0.0.0.0:7001", "0.0.0.0"),
        ("", "127.0.0.1"),
    ],
)
def test_metrics_are_where_the_process_is(listen_address: str, host: str) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]

    server = serve_metrics(CollectorRegistry(), port, listen_address)

    assert server is not None
    assert server.server_address[0] == host
    server.shutdown()
    server.server_close()
