"""Calls to other tiers: channels, unary calls with a deadline, and streams that are always cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from libs.errors import OctavoError
from libs.rpc.context import CallContext
from libs.rpc.statuses import error_from_rpc

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# Streams live for the whole life of a pair of processes: keep-alive notices a peer that vanished without a word.
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A keep-alive that finds another ping under way waits for that one instead, by default for a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Two channels to one address must not share a connection's fate or its back-off.
    ("grpc.use_local_subchannel_pool", 1),
)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


def make_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to ``host:port`` or ``unix:/path``; it connects when first used."""
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


async def unary(
    method: Any,  # A multi-callable of a generated stub; grpc.aio's type for it cannot be named at run time.
    request: Any,
    *,
    timeout_seconds: float,
    on_lost: type[OctavoError],
    context: CallContext | None = None,
) -> Any:
    """Call a unary method with a deadline and metadata.

    Raises:
        OctavoError: what the peer answered, or ``on_lost`` when it cannot be reached.
    """
    try:
        return await method(request, timeout=timeout_seconds, metadata=context.as_metadata() if context else None)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, on_lost=on_lost) from error


class RpcStream(Generic[RequestT, ResponseT]):
    """An open streaming call; made by ``open_stream`` only."""

    def __init__(self, call: Any, on_lost: type[OctavoError]) -> None:
        self._call = call
        self._on_lost = on_lost

    async def send(self, request: RequestT) -> None:
        """Write one message; raises ``on_lost`` or the peer's error when the call has ended."""
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, on_lost=self._on_lost) from error
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            # grpc.aio's answer to a write after the call's end.
            raise await self._ending(error) from error
        except grpc.aio.InternalError as error:
            raise self._on_lost(f"The stream broke: {error}.") from error

    async def done_sending(self) -> None:
        """Tell the peer that nothing more comes."""
        await self._call.done_writing()

    async def __aiter__(self) -> AsyncIterator[ResponseT]:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                yield message
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, on_lost=self._on_lost) from error

    async def _ending(self, cause: Exception) -> OctavoError:
        code, details = await self._call.code(), await self._call.details()
        return self._on_lost(f"The stream has ended with {code.name}: {details or cause}.")


@asynccontextmanager
async def open_stream(
    method: Any,  # As in ``unary``.
    request: Any | None = None,
    *,
    on_lost: type[OctavoError],
    context: CallContext | None = None,
) -> AsyncIterator[RpcStream[Any, Any]]:
    """Open a streaming call and cancel it on leaving, whatever the reason.

    Leaving an ``async for`` over a grpc.aio call does not cancel it; this is the only place that may
    iterate a call. ``request`` is given for calls that stream in one direction only.
    """
    metadata = context.as_metadata() if context else None
    call = method(metadata=metadata) if request is None else method(request, metadata=metadata)
    try:
        yield RpcStream(call, on_lost)
    finally:
        call.cancel()
