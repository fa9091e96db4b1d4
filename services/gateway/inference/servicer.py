"""octavo.inference.v1.InferenceService: the requests of the HTTP API by another wire.

Owns how a call becomes a request and an error a status. What a request means and how it is served is the code that
serves HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from libs.errors import OctavoError, PayloadTooLarge
from libs.obs import get_logger
from libs.protogen.inference.v1 import inference_pb2, inference_pb2_grpc
from libs.rpc import Registration, RpcServer, abort_with, make_server
from services.gateway.answer_format import AnswerFormat, AnswerHead
from services.gateway.client_call import Caller, RequestBody, read_client_request_id, read_traceparent
from services.gateway.completions import Completions
from services.gateway.endpoints import CHAT, TEXT, Endpoint, Request
from services.gateway.http_errors import internal_error, known_error
from services.gateway.identity import Authenticator
from services.gateway.inference.answers import Message, MessageFormat, MessageWriter
from services.gateway.inference.wire import (
    chat_body,
    chat_message,
    models_message,
    text_body,
    text_message,
    tokenize_body,
    tokens_message,
)
from services.gateway.models import Models
from services.gateway.tokenization import Tokenization

log = get_logger("inference")

Result = TypeVar("Result")
# Of a generated message or of grpc.aio, whose types cannot be named more closely.
Context = Any

_SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_OUR_REQUEST_ID: Final = "x-octavo-request-id"
_CLIENT_REQUEST_ID: Final = "x-request-id"
_QUESTION_TIMEOUT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """One call."""

    context: Context
    caller: Caller
    # How its message becomes the body that it would be over HTTP.
    to_body: Callable[[], dict[str, Any]]
    num_bytes: int
    max_bytes: int
    message_type: Any = None

    @property
    def remaining_seconds(self) -> float | None:
        """The time until the call's deadline, if it has one."""
        remaining: float | None = self.context.time_remaining()
        return remaining

    async def read_body(self) -> RequestBody:
        """Return the body; raises OctavoError."""
        if self.num_bytes > self.max_bytes:
            raise PayloadTooLarge(f"The message is larger than this server's limit of {self.max_bytes} bytes.")
        return RequestBody(self.to_body(), self.num_bytes)

    def new_writer(self, deadline: float) -> MessageWriter:
        """Return what writes the answer."""
        return MessageWriter(self.context, self.message_type, deadline=deadline)


def _over_grpc(
    endpoint: Endpoint[Request], message_of: Callable[[Mapping[str, Any]], Message]
) -> Endpoint[Request]:
    """Return an endpoint whose answers are messages."""

    def new_format(request: Request, head: AnswerHead, prompts: Any, tokenizer: Any) -> AnswerFormat:
        return MessageFormat(endpoint.new_format(request, head, prompts, tokenizer), message_of)

    return replace(endpoint, new_format=new_format)


_CHAT: Final = _over_grpc(CHAT, chat_message)
_TEXT: Final = _over_grpc(TEXT, text_message)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers calls."""

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        completions: Completions,
        tokenization: Tokenization,
        models: Models,
        new_request_id: Callable[[], str],
        max_message_bytes: int,
    ) -> None:
        self._authenticator = authenticator
        self._completions = completions
        self._tokenization = tokenization
        self._models = models
        self._new_request_id = new_request_id
        self._max_message_bytes = max_message_bytes

    # The generated types know only handlers that yield; grpc.aio also takes those that write.
    async def ChatCompletion(self, request: inference_pb2.ChatCompletionRequest, context: Context) -> None:  # type: ignore[override]
        """Answer a conversation."""
        async with self._call(context, "ChatCompletion", request, chat_body) as call:
            await self._completions.serve(replace(call, message_type=inference_pb2.ChatCompletionResponse), _CHAT)

    async def Completion(self, request: inference_pb2.CompletionRequest, context: Context) -> None:  # type: ignore[override]
        """Go on with plain prompts."""
        async with self._call(context, "Completion", request, text_body) as call:
            await self._completions.serve(replace(call, message_type=inference_pb2.CompletionResponse), _TEXT)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Return the names that the caller may use."""
        async with self._call(context, "ListModels", request, lambda _: {}) as call:
            return models_message(self._models.of_tenant(call.caller.tenant))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Return the tokens of a prompt."""
        async with self._call(context, "Tokenize", request, tokenize_body) as call:
            return tokens_message(await self._tokenization.tokenize(call))

    @asynccontextmanager
    async def _call(
        self, context: Context, method: str, request: Any, to_body: Callable[[Any], dict[str, Any]]
    ) -> AsyncIterator[GrpcCall]:
        """Find out who calls, and end the call with the status of any error."""
        request_id = self._new_request_id()
        metadata = _metadata_of(context)
        client_request_id = read_client_request_id(metadata.get(_CLIENT_REQUEST_ID))
        await context.send_initial_metadata(
            ((_OUR_REQUEST_ID, request_id), (_CLIENT_REQUEST_ID, client_request_id or request_id))
        )
        try:
            tenant = self._authenticator.authenticate(metadata.get("authorization"), metadata.get("x-api-key"))
            traceparent = read_traceparent(metadata.get("traceparent"))
            caller = Caller(tenant, f"/{_SERVICE}/{method}", request_id, client_request_id, traceparent)
            yield GrpcCall(context, caller, lambda: to_body(request), request.ByteSize(), self._max_message_bytes)
        except OctavoError as error:
            await abort_with(context, known_error(error), request_id=request_id)
        except Exception:
            log.exception("call failed", method=method, request_id=request_id)
            await abort_with(context, internal_error(request_id), request_id=request_id)


class GuardedReflection(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types here.
    """Asks for a key also where a server describes itself; its health is everybody's."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Let a call through, or end it with the status of its error."""
        if str(handler_call_details.method).startswith("/grpc.reflection."):
            metadata = _texts(handler_call_details.invocation_metadata)
            try:
                self._authenticator.authenticate(metadata.get("authorization"), metadata.get("x-api-key"))
            except OctavoError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def make_inference_server(
    address: str, servicer: InferenceServicer, authenticator: Authenticator, *, shares_port: bool = False
) -> RpcServer:
    """Make the server at ``host:port``, beside which stand health, for all, and reflection, for who has a key."""
    registration = Registration(inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer, _SERVICE)
    return make_server(address, [registration], [GuardedReflection(authenticator)], shares_port=shares_port)


def _refusing(error: OctavoError) -> Any:
    async def refuse(requests: Any, context: Context) -> None:
        # A client that still writes its question when the answer comes may see its own broken write instead.
        with suppress(TimeoutError):
            async with asyncio.timeout(_QUESTION_TIMEOUT_SECONDS):
                await context.read()
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _metadata_of(context: Context) -> dict[str, str]:
    return _texts(context.invocation_metadata())


def _texts(metadata: Any) -> dict[str, str]:
    """Return metadata by name; values that are bytes are of no header that is read here."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}
