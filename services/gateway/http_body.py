"""The body of a request: its content type, its size and the time that it may take. Owns nothing of its meaning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import ClientPayloadError, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from libs.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from services.gateway.client_call import LONG_BODY_BYTES
from services.gateway.json_body import JsonBody

_JSON = "application/json"
# To take a part of a long body keeps the event loop for up to 0.5 ms. A step's tokens need it three times on their
# way through gRPC, so that parts one behind the other would hold them up three times.
_REST_SECONDS = 0.001
_CHARSETS = (None, "utf-8", "utf8", "us-ascii")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How large a body may be and how long it may take."""

    max_bytes: int
    timeout_seconds: float


async def read_json_body(request: web.Request, limits: BodyLimits, on_long: Callable[[], None]) -> JsonBody:
    """Return a body that says that it is JSON, taken in parts as they come: between them others get their turn.

    ``on_long`` is called once it is long, before the rest of it is taken.

    Raises:
        UnsupportedMediaType: it says that it is something else, or compressed.
        PayloadTooLarge: it is over the limit; most of it is not read then.
        InvalidRequest: it does not come in time or breaks the protocol.
    """
    _check_type(request)
    if request.content_length is not None and request.content_length > limits.max_bytes:
        raise _too_large(limits.max_bytes)
    try:
        async with asyncio.timeout(limits.timeout_seconds):
            return await _read(request.content, limits.max_bytes, on_long)
    except TimeoutError:
        raise InvalidRequest(f"The body did not arrive within {limits.timeout_seconds:g} seconds.") from None
    except (ClientPayloadError, HttpProcessingError) as error:
        raise InvalidRequest("The body breaks the rules of HTTP, so it was not read to its end.") from error


async def _read(content: StreamReader, max_bytes: int, on_long: Callable[[], None]) -> JsonBody:
    body, num_bytes = JsonBody(), 0
    while data := await content.readany():
        if num_bytes <= LONG_BODY_BYTES < num_bytes + len(data):
            on_long()
        num_bytes += len(data)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        body.add(data)
        if num_bytes > LONG_BODY_BYTES:
            await asyncio.sleep(_REST_SECONDS)
    return body


def _check_type(request: web.Request) -> None:
    content_type = request.content_type
    if "Content-Type" not in request.headers or content_type != _JSON:
        raise UnsupportedMediaType("The body must be JSON: send 'Content-Type: application/json'.")
    charset = request.charset
    if (charset.lower() if charset else None) not in _CHARSETS:
        raise UnsupportedMediaType("The body must be JSON in UTF-8; send no other charset.")
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise UnsupportedMediaType("The body must not be compressed; send no 'Content-Encoding'.")
    if request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise UnsupportedMediaType("The body must not be compressed; send 'Transfer-Encoding: chunked' alone.")


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than this server's limit of {max_bytes} bytes.")
