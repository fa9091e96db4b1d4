"""Errors as OpenAI's clients expect them. Owns bodies, statuses and headers of errors; nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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


def error_body(error: OctavoError) -> bytes:
    """Return OpenAI's error object as JSON."""
    try:
        return orjson.dumps(error_object(error))
    except TypeError:
        # A message that is not Unicode, as a path or a header may be.
        spec = spec_of(error)
        message = error.message.encode(errors="replace").decode()
        return orjson.dumps(
            {"error": {"message": message, "type": spec.http_type, "param": None, "code": spec.http_code}}
        )


def http_error(error: OctavoError) -> HttpError:
    """Return status, body and headers of an error."""
    headers: dict[str, str] = {}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="octavo"'
    return HttpError(spec_of(error).http_status, error_body(error), headers)


def error_response(error: OctavoError) -> web.Response:
    """Return the answer for an error that is known before any byte was sent."""
    answer = http_error(known_error(error))
    return web.Response(
        status=answer.status, body=answer.body, headers=answer.headers, content_type="application/json"
    )
