"""Bodies: compressed or not, whole or refused, never larger than the bound."""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Callable

import pytest
from backports import zstd

from services.telemetry.embedded_clickhouse.bodies import decode_body
from services.telemetry.embedded_clickhouse.errors import ClickHouseError

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "lz4": importlib.import_module("lz4.frame").compress,
    "zstd": zstd.compress,
}


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_one_frame_or_several_become_one_body(encoding: str) -> None:
    compress = COMPRESSORS[encoding]
    body = compress(b"first ") + compress(b"") + compress(b"second" * 1_000)

    decoded = decode_body(body, f" {encoding.upper()}", max_bytes=6_006)

    assert decoded == b"first " + b"second" * 1_000


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_a_plain_body_is_left_as_it_is(encoding: str) -> None:
    assert decode_body(b"SELECT 1", encoding, max_bytes=100) == b"SELECT 1"


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_a_body_that_grows_over_the_bound_is_refused(encoding: str) -> None:
    compress = COMPRESSORS[encoding]

    for body in (compress(bytes(1_001)), compress(bytes(600)) + compress(bytes(401))):
        with pytest.raises(ClickHouseError, match="over 1000 bytes") as caught:
            decode_body(body, encoding, max_bytes=1_000)
        assert caught.value.http_status == 413


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_a_body_that_is_cut_off_is_refused(encoding: str) -> None:
    body = COMPRESSORS[encoding](bytes(range(256)) * 4)

    for cut in (len(body) - 1, len(body) // 2):
        with pytest.raises(ClickHouseError, match="middle of a frame") as caught:
            decode_body(body[:cut], encoding, max_bytes=10_000)
        assert caught.value.http_status == 400


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_a_body_in_another_encoding_than_it_says_is_refused(encoding: str) -> None:
    with pytest.raises(ClickHouseError, match=f"not {encoding}"):
        decode_body(b"SELECT 1, but in plain text", encoding, max_bytes=1_000)


def test_an_encoding_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ClickHouseError, match="'br' is not supported"):
        decode_body(b"x", "br", max_bytes=1_000)
