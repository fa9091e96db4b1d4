"""The HTTP application: routes, who may use them, and errors in the shape of each route's clients.

Owns what every route has in common. It must not know how a completion is made.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
from aiohttp import HttpVersion11, hdrs, web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry

from libs.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NoEngineAvailable,
    OctavoError,
    PayloadTooLarge,
    PermissionDenied,
    RouteNotFound,
)
from libs.hosts import is_private_name
from libs.obs import get_logger
from libs.obs.metrics import GatewayMetrics, ScrapedEngineMetrics, render
from services.gateway.admission import Admission, draining_error
from services.gateway.anthropic_answers import error_shape
from services.gateway.body_memory import BodyMemory
from services.gateway.client_call import Caller, read_client_request_id, read_traceparent
from services.gateway.completions import Completions
from services.gateway.endpoints import CHAT, MESSAGES, RESPONSES, TEXT, Endpoint, Request
from services.gateway.engine_directory import EngineDirectory
from services.gateway.http_body import BodyLimits
from services.gateway.http_call import HttpCall
from services.gateway.http_errors import error_object, error_response, internal_error
from services.gateway.http_server import SERVER_NAME, take_first_byte_time
from services.gateway.identity import Authenticator
from services.gateway.latency_receipt import Segment
from services.gateway.model_access import names_for
from services.gateway.models import Models
from services.gateway.openapi import ApiDescription
from services.gateway.request_times import RequestTimes
from services.gateway.tokenization import Tokenization

log = get_logger("app")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CALLER: Final = web.RequestKey("caller", Caller)
_TIMES: Final = web.RequestKey("times", RequestTimes)
_REQUEST_ID: Final = web.RequestKey("request_id", str)
_OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health", "/metrics"})
_CLIENT_HEADER, _OUR_HEADER = "X-Request-Id", "X-Octavo-Request-Id"
# How a client of any dialect asks for a latency receipt, and how it is told what is known before the answer.
_TIMINGS_HEADER, _SERVER_TIMING_HEADER = "X-Octavo-Timings", "Server-Timing"
# How Anthropic's clients send their key.
_API_KEY_HEADER: Final = "X-Api-Key"
_ANTHROPIC_PATH: Final = "/v1/messages"
# Where Anthropic's clients look for the request's id.
_ANTHROPIC_HEADER: Final = "Request-Id"
_ENGINE_SCRAPE_TIMEOUT_SECONDS: Final = 0.5
_NOT_READY_RETRY_SECONDS: Final = 2.0
_METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes are made of."""

    completions: Completions
    tokenization: Tokenization
    authenticator: Authenticator
    admission: Admission
    directory: EngineDirectory
    metrics: GatewayMetrics
    body_limits: BodyLimits
    body_memory: BodyMemory
    models: Models
    readiness_timeout_seconds: float
    # Whether only names of this machine are answered.
    is_local_only: bool


def make_app(parts: Parts, *, max_body_bytes: int) -> web.Application:
    """Build the application."""
    routes = _Routes(parts)
    app = web.Application(
        client_max_size=max_body_bytes,
        middlewares=[
            _errors_in_shape,
            *([_local_names_only] if parts.is_local_only else []),
            _authenticate(parts.authenticator),
        ],
    )
    app.on_response_prepare.append(_add_request_ids)
    app.on_response_prepare.append(_add_server_timing)
    app.on_response_prepare.append(_add_limits)
    app.add_routes(
        [
            web.post("/v1/chat/completions", routes.chat_completions, expect_handler=_go_on),
            web.post("/v1/completions", routes.text_completions, expect_handler=_go_on),
            web.post("/v1/responses", routes.responses, expect_handler=_go_on),
            web.post("/v1/messages", routes.messages, expect_handler=_go_on),
            web.post("/v1/messages/count_tokens", routes.count_message_tokens, expect_handler=_go_on),
            web.post("/tokenize", routes.tokenize, expect_handler=_go_on),
            web.post("/detokenize", routes.detokenize, expect_handler=_go_on),
            web.get("/v1/models", routes.list_models),
            web.get("/v1/models/{model_id:.+}", routes.get_model),
            web.get("/openapi.json", routes.openapi),
            web.get("/livez", routes.livez),
            web.get("/readyz", routes.readyz),
            # What other servers of this kind call it.
            web.get("/health", routes.readyz),
            web.get("/metrics", routes.metrics),
        ]
    )
    return app


class _Routes:
    """The handlers of all routes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._description = ApiDescription(parts.models.facts)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, CHAT)

    async def text_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, TEXT)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, RESPONSES)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, MESSAGES)

    async def _complete(self, request: web.Request, endpoint: Endpoint[Request]) -> web.StreamResponse:
        return await self._parts.completions.serve(self._call(request), endpoint)

    def _call(self, request: web.Request) -> HttpCall:
        return HttpCall(request, request[_CALLER], self._parts.body_limits, self._parts.body_memory)

    async def count_message_tokens(self, request: web.Request) -> web.Response:
        return _json(await self._parts.tokenization.count_message_tokens(self._call(request)))

    async def tokenize(self, request: web.Request) -> web.Response:
        return _json(await self._parts.tokenization.tokenize(self._call(request)))

    async def detokenize(self, request: web.Request) -> web.Response:
        return _json(await self._parts.tokenization.detokenize(self._call(request)))

    async def list_models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": self._parts.models.of_tenant(request[_CALLER].tenant)})

    async def get_model(self, request: web.Request) -> web.Response:
        return _json(self._parts.models.named(request.match_info["model_id"], request[_CALLER].tenant))

    async def openapi(self, request: web.Request) -> web.Response:
        names = names_for(request[_CALLER].tenant, self._parts.models.facts)
        body = self._description.as_json(names)
        return web.Response(body=body, content_type="application/json")

    async def livez(self, request: web.Request) -> web.Response:
        """Answer as long as the event loop runs; a supervisor restarts the process when it does not."""
        return _json({"status": "alive"})

    async def readyz(self, request: web.Request) -> web.Response:
        """Answer well while requests can be served; a balancer sends none when they cannot."""
        if self._parts.admission.is_draining:
            raise draining_error()
        reason = await self._parts.directory.unready_reason(self._parts.readiness_timeout_seconds)
        if reason is not None:
            raise NoEngineAvailable(reason, retry_after_seconds=_NOT_READY_RETRY_SECONDS)
        return _json({"status": "ready"})

    async def metrics(self, request: web.Request) -> web.Response:
        """Show the gateway's own metrics and what engines say of themselves now."""
        engines = ScrapedEngineMetrics(CollectorRegistry())
        for engine in await self._parts.directory.ask_all(_ENGINE_SCRAPE_TIMEOUT_SECONDS):
            engines.observe(
                engine.engine_id,
                num_running_requests=engine.num_running_requests,
                num_waiting_requests=engine.num_waiting_requests,
                num_blocks_used=engine.num_blocks_used,
                num_blocks=engine.num_blocks,
            )
        body = self._parts.metrics.render() + render(engines.registry)
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: _METRICS_CONTENT_TYPE})


@web.middleware
async def _errors_in_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into its status and a body as the route's clients expect it."""
    request[_REQUEST_ID] = str(uuid.uuid4())
    request[_TIMES] = _times_of(request)
    shape = error_shape(request[_REQUEST_ID]) if _is_anthropic(request) else error_object
    try:
        return await handler(request)
    except OctavoError as error:
        return error_response(error, shape)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = error_response(
            MethodNotAllowed(f"{request.method} is not allowed on {request.path[:128]!r}; use {allowed}."), shape
        )
        response.headers[hdrs.ALLOW] = allowed
        return response
    except web.HTTPNotFound:
        return error_response(RouteNotFound(f"There is no route {request.method} {request.path[:128]!r}."), shape)
    except web.HTTPRequestEntityTooLarge:
        return error_response(PayloadTooLarge("The body is larger than this server's limit."), shape)
    except web.HTTPException as error:
        return error_response(InvalidRequest(f"The request cannot be served: {error.reason}."), shape)
    except Exception:
        log.exception("route failed", path=request.path[:128], request_id=request[_REQUEST_ID])
        return error_response(internal_error(request[_REQUEST_ID]), shape)


@web.middleware
async def _local_names_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a web page of somebody else makes a browser ask."""
    authority = request.headers.get(hdrs.HOST, "")
    if not is_private_name(authority):
        raise PermissionDenied(
            f"Without API keys this server answers its own machine only, not requests for {authority[:128]!r}: use "
            "http://127.0.0.1, configure API keys, or set gateway.allow_unauthenticated to true."
        )
    return await handler(request)


def _authenticate(authenticator: Authenticator) -> Middleware:
    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for a key on every route but the probes, also on those that do not exist."""
        if request.path not in _OPEN_PATHS:
            tenant = authenticator.authenticate(
                request.headers.get(hdrs.AUTHORIZATION), request.headers.get(_API_KEY_HEADER)
            )
            times = request[_TIMES]
            times.lap(Segment.AUTH)
            traceparent = read_traceparent(request.headers.get("traceparent"))
            request[_CALLER] = Caller(
                tenant, request.path, request[_REQUEST_ID], _client_request_id(request), traceparent, times
            )
        return await handler(request)

    return authenticate


async def _go_on(request: web.Request) -> None:
    """Let a client that asks first send its body; aiohttp would answer other expectations in plain text."""
    if request.version < HttpVersion11 or request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        return
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    # The answer has not begun.
    request.writer.output_size = 0


async def _add_request_ids(request: web.Request, response: web.StreamResponse) -> None:
    request_id = request.get(_REQUEST_ID) or str(uuid.uuid4())
    response.headers[hdrs.SERVER] = SERVER_NAME
    response.headers[_OUR_HEADER] = request_id
    if _is_anthropic(request):
        response.headers[_ANTHROPIC_HEADER] = request_id
    response.headers[_CLIENT_HEADER] = _client_request_id(request) or request_id


async def _add_server_timing(request: web.Request, response: web.StreamResponse) -> None:
    """Tell what is known of the request's time before the first byte of its answer."""
    times = request.get(_TIMES)
    if times is not None and times.is_wanted and (value := times.server_timing()):
        response.headers[_SERVER_TIMING_HEADER] = value


async def _add_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Tell where the tenant stands, if the request was counted against its limits."""
    caller = request.get(_CALLER)
    if caller is not None:
        response.headers.update(caller.limit_report.headers)


def _times_of(request: web.Request) -> RequestTimes:
    times = RequestTimes(take_first_byte_time(request))
    times.is_wanted = request.headers.get(_TIMINGS_HEADER) == "1"
    times.lap(Segment.RECEIVE)
    return times


def _is_anthropic(request: web.Request) -> bool:
    return request.path == _ANTHROPIC_PATH or request.path.startswith(f"{_ANTHROPIC_PATH}/")


def _client_request_id(request: web.Request) -> str | None:
    return read_client_request_id(request.headers.get(_CLIENT_HEADER))


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
