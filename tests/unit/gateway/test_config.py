"""The gateway's configuration."""

from __future__ import annotations

import pytest

from libs.config import ConfigError, load
from services.gateway.config import GatewayConfig


def configured(*argv: str) -> GatewayConfig:
    return load(GatewayConfig, tier="gateway", argv=argv, environ={})


def test_the_defaults_serve_this_machine_only() -> None:
    config = configured()

    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.api_keys_file is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_no_keys_are_needed_on_a_loopback_address(host: str) -> None:
    assert configured("--host", host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", ""])
def test_no_keys_on_a_reachable_address_is_refused_with_the_ways_out(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured("--host", host)

    assert "gateway.api_keys_file" in str(caught.value)
    assert "gateway.allow_unauthenticated" in str(caught.value)
    assert configured("--host", host, "--allow-unauthenticated", "true").allow_unauthenticated
    assert configured("--host", host, "--api-keys-file", "keys").host == host


@pytest.mark.parametrize(
    "argv",
    [
        ("--tool-format", "xml"),
        ("--reasoning-format", "loud"),
        ("--port", "70000"),
        ("--port", "-1"),
        ("--gateway-id", "../x"),
        ("--gateway-id", ""),
        ("--default-max-tokens", "0"),
        ("--request-timeout-seconds", "0"),
        ("--max-body-bytes", "-5"),
        ("--sse-heartbeat-seconds", "nan"),
        ("--drain-timeout-seconds", "-1"),
        ("--model-aliases", "a,b,a"),
        ("--limit-timeout-seconds", "0"),
        ("--limit-lease-seconds", "0.9"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        configured(*argv)


def test_lists_and_flags_are_read() -> None:
    config = configured(
        *("--engine-addresses", "a:1, unix:/b", "--router-address", "unix:/r"),
        *("--model-aliases", "meta-llama/Llama-3-70b-instruct, gpt-4o"),
    )

    assert config.engine_addresses == ("a:1", "unix:/b")
    assert config.model_aliases == ("meta-llama/Llama-3-70b-instruct", "gpt-4o")
    assert config.router_address == "unix:/r"
