"""Which ports can be listened on."""

from __future__ import annotations

import socket

import pytest

from services.supervisor.failures import UpFailed
from services.supervisor.ports import claim_port


def test_zero_takes_a_free_port() -> None:
    port = claim_port("127.0.0.1", 0)

    with socket.create_server(("127.0.0.1", port)):
        assert port > 0


def test_says_that_a_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        with pytest.raises(UpFailed, match=f"Port {port} on 127.0.0.1 is taken by another process"):
            claim_port("127.0.0.1", port)


def test_says_that_an_address_is_not_of_this_machine() -> None:
    # 192.0.2.0/24 is kept for documentation (RFC 5737).
    with pytest.raises(UpFailed, match="cannot be listened on"):
        claim_port("192.0.2.1", 0)


def test_says_that_an_address_is_not_known() -> None:
    with pytest.raises(UpFailed, match="is not known"):
        claim_port("no such host", 0)
