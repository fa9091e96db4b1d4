"""Serving metrics on a port of their own."""

from __future__ import annotations

import socket

import pytest
from prometheus_client import CollectorRegistry

from libs.errors import InternalError
from libs.obs.metrics import serve_metrics


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(InternalError, match=rf"port {port}: .*metrics_port"):
            serve_metrics(CollectorRegistry(), port)


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(InternalError, match="port 99999"):
        serve_metrics(CollectorRegistry(), 99_999)


def test_no_port_serves_nothing() -> None:
    assert serve_metrics(CollectorRegistry(), 0) is None
