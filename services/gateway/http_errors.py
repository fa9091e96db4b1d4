"""Errors as clients expect them. Owns OpenAI's bodies, and the statuses and headers of all errors; nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from libs.errors import InternalError, OctavoError, Unauthenticated, spec_of


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as it goes out over HTTP."""

    status: int
    body: bytes
    headers: dict[str, str]


def known_error(error: OctavoError) -> OctavoError:
    """Return the error itself, or InternalError for a class that stands for no answer of its own."""
    try:
        spec_of(error)
    except KeyError:
        return InternalError("Something went wrong on our side; please try again.")
    return error


def internal_error(request_id: str) -> InternalError:
    """Return what a client is told of a fault that has no better name; the log tells the rest."""
    return InternalError(f"Something went wrong on our side; the request was {request_id}.")


def error_object(error: OctavoError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    spec = spec_of(error)
    return {
        "error": {
            "message": error.message,
            "type": spec.http_type,
            "param": error.param,
            "code": spec.http_code,
        }
    }


# How an API tells an error.
ErrorShape: TypeAlias = Callable[[OctavoError], dict[str, Any]]


def error_body(error: OctavoError, shape: ErrorShape = error_object) -> bytes:
    """Return an error as JSON."""
    try:
        return orjson.dumps(shape(error))
    except TypeError:
        # A message that is not Unicode, as a path or a header may be.
        return orjson.dumps(shape(type(error)(error.message.encode(errors="replace").decode())))


def http_error(error: OctavoError, shape: ErrorShape = error_object) -> HttpError:
    """Return status, body and headers of an error."""
    headers: dict[str, str] = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="octavo"'
    return HttpError(spec_of(error).http_status, error_body(error, shape), headers)


def error_response(error: OctavoError, shape: ErrorShape = error_object) -> web.Response:
    """Return the answer for an error that is known before any byte was sent."""
    answer = http_error(known_error(error), shape)
    return web.Response(
        status=answer.status, body=answer.body, headers=answer.headers, content_type="application/json"
    )
