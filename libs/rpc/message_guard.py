"""What becomes of a call whose message cannot be read: it ends with INVALID_ARGUMENT and one sentence.

By itself grpc.aio answers UNKNOWN with the name of a Python class, and writes a traceback into the log of whoever
was sent something damaged. Owns that translation, for all services of a server. It must not know any of them.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from libs.errors import InvalidRequest, OctavoError
from libs.obs import get_logger
from libs.rpc.statuses import abort_with

_log = get_logger("rpc")

# By whether requests and responses are streams.
_HANDLERS: Final[dict[tuple[bool, bool], tuple[str, Callable[..., Any]]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class MessageGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc.aio has no types here.
    """Lets servicers see only messages that could be read.

    A servicer that iterates over its requests gets ``InvalidRequest`` from them; whatever error of ours it lets
    through becomes the call's status.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler with the guard around it; None where there is no such method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        name, make_handler = _HANDLERS[handler.request_streaming, handler.response_streaming]
        read = _reader(handler.request_deserializer, str(handler_call_details.method))
        return make_handler(
            _guarded(getattr(handler, name)),
            request_deserializer=_raising(read) if handler.request_streaming else read,
            response_serializer=handler.response_serializer,
        )


# Messages of a method are of its own type, which nothing here needs to know.
_Read = Callable[[bytes], Any]


def _reader(deserialize: _Read, method: str) -> _Read:
    """Return what reads a message or says, as a value, why it cannot be read."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            _log.warning("message cannot be read", method=method, num_bytes=len(data))
            return InvalidRequest(f"The message cannot be read: it is none of {method}, or damaged.")

    return read


def _raising(read: _Read) -> _Read:
    """Return what reads one of many messages: the servicer that iterates over them gets the error."""

    def read_or_raise(data: bytes) -> Any:
        message = read(data)
        if isinstance(message, InvalidRequest):
            raise message
        return message

    return read_or_raise


def _guarded(behavior: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a servicer's method that ends with the status of an error, its request's first."""

    async def write(request: Any, context: Any) -> Any:
        try:
            return await behavior(_checked(request), context)
        except OctavoError as error:
            await abort_with(context, error)

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(behavior(_checked(request), context)) as responses:
                async for response in responses:
                    yield response
        except OctavoError as error:
            await abort_with(context, error)

    return generate if inspect.isasyncgenfunction(behavior) else write


def _checked(request: Any) -> Any:
    if isinstance(request, InvalidRequest):
        raise request
    return request
