"""Request bodies as they come over HTTP: compressed or not, never larger than a bound."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Final, Protocol

from services.telemetry.embedded_clickhouse.errors import (
    BAD_ARGUMENTS,
    CANNOT_DECOMPRESS,
    TOO_LARGE,
    ClickHouseError,
)

_GZIP_WINDOW: Final = 31
_DEFLATE_WINDOW: Final = 15


def decode_body(body: bytes, content_encoding: str, max_bytes: int) -> bytes:
    """Undo a Content-Encoding; a body may be several compressed frames, one after the other."""
    encoding = content_encoding.strip().lower()
    if encoding in ("", "identity") or not body:
        return body
    make_decompressor = _decompressor_for(encoding)
    parts: list[bytes] = []
    num_bytes = 0
    while body:
        decompressor = make_decompressor()
        try:
            # One byte over the bound is enough to know.
            part = decompressor.decompress(body, max_bytes - num_bytes + 1)
        except Exception as error:  # Each library has its own class for "this is not my format".
            raise ClickHouseError.of(
                CANNOT_DECOMPRESS, f"The body is not {encoding} as its Content-Encoding says: {error}"
            ) from error
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise ClickHouseError.of(TOO_LARGE, f"The body is over {max_bytes} bytes once decompressed")
        if not decompressor.eof:
            raise ClickHouseError.of(CANNOT_DECOMPRESS, f"The {encoding} body ends in the middle of a frame")
        parts.append(part)
        body = decompressor.unused_data or b""
    return b"".join(parts)


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes | None: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _decompressor_for(encoding: str) -> Callable[[], _Decompressor]:
    """Find the decompressor of an encoding. lz4 and zstd come with clickhouse-connect."""
    try:
        if encoding == "gzip":
            return lambda: zlib.decompressobj(_GZIP_WINDOW)
        if encoding == "deflate":
            return lambda: zlib.decompressobj(_DEFLATE_WINDOW)
        if encoding == "lz4":
            return _maker("lz4.frame", "LZ4FrameDecompressor")
        if encoding == "zstd":
            return _maker("backports.zstd", "ZstdDecompressor")
    except ImportError as error:
        raise ClickHouseError.of(
            BAD_ARGUMENTS, f"Content-Encoding {encoding} needs a package that is not installed: {error.name}"
        ) from error
    raise ClickHouseError.of(
        BAD_ARGUMENTS, f"Content-Encoding {encoding!r} is not supported; use gzip, deflate, lz4, zstd or none"
    )


def _maker(module: str, name: str) -> Callable[[], _Decompressor]:
    make: Callable[[], _Decompressor] = getattr(importlib.import_module(module), name)
    return make
