"""Servers: our services beside the standard health and reflection services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from libs.errors import InternalError
from libs.rpc.calls import MAX_MESSAGE_BYTES
from libs.rpc.message_guard import MessageGuard

_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A client that vanished without a word must not hold what it asked for until its answers end.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Peers ping every 20 s, also when idle; the default would answer that with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class Registration:
    """A service to be served: the generated ``add_…_to_server``, the servicer, the full service name."""

    add_to_server: Callable[[Any, grpc.aio.Server], None]
    servicer: Any
    service_name: str


class RpcServer:
    """A gRPC server with health and reflection; made by ``make_server``."""

    def __init__(
        self,
        address: str,
        registrations: Sequence[Registration],
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        *,
        shares_port: bool,
    ) -> None:
        self.address = address
        # Two processes must never share a port by accident.
        options = (*_SERVER_OPTIONS, ("grpc.so_reuseport", int(shares_port)))
        self._server = grpc.aio.server(interceptors=[MessageGuard(), *interceptors], options=options)
        self._service_names = [registration.service_name for registration in registrations]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for registration in registrations:
            registration.add_to_server(registration.servicer, self._server)
        names = [*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)

    async def start(self) -> None:
        """Listen; raises InternalError when the address cannot be bound."""
        await self.set_serving(False)
        try:
            port = self._server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise InternalError(f"Cannot listen on {self.address}: {error}.") from error
        host, _, requested = self.address.rpartition(":")
        if requested == "0" and not self.address.startswith("unix:"):
            self.address = f"{host}:{port}"
        await self._server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Tell health watchers whether the services take calls."""
        for name in ["", *self._service_names]:
            await self.set_health(name, is_serving=is_serving)

    async def set_health(self, name: str, *, is_serving: bool) -> None:
        """Tell those who watch the health of ``name``, a service or whatever else they know, how it is."""
        statuses = health_pb2.HealthCheckResponse
        await self._health.set(name, statuses.SERVING if is_serving else statuses.NOT_SERVING)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, let open ones run for ``grace_seconds``, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)


def make_server(
    address: str,
    registrations: Sequence[Registration],
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    *,
    shares_port: bool = False,
) -> RpcServer:
    """Make a server for ``host:port`` (port 0 takes a free one) or ``unix:/path``; interceptors see all calls.

    Servers that all share a port get their share of its connections.
    """
    return RpcServer(address, registrations, interceptors, shares_port=shares_port)
