"""Health checks as effects: ask a process whether it is ready."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.errors import OctavoError, StoreUnavailable
from libs.rpc import make_channel, unary
from services.supervisor.plan import GrpcHealth, HttpGet, Probe, ValkeyPing

_ATTEMPT_SECONDS = 2.0
_INTERVAL_SECONDS = 0.1
_SILENCE_INTERVAL_SECONDS = 1.0


async def wait_until_healthy(probe: Probe) -> None:
    """Return when the process answers well; whoever waits sets the bound by cancelling."""
    if isinstance(probe, GrpcHealth):
        await _wait_for_grpc(probe)
    else:
        await _wait_for_line(probe)


async def wait_until_silent(probe: GrpcHealth, limit_seconds: float) -> None:
    """Return when the process has answered nothing for so long; a refusal is an answer."""
    clock = asyncio.get_running_loop().time
    async with make_channel(probe.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        last_answer = clock()
        while True:
            await asyncio.sleep(min(_SILENCE_INTERVAL_SECONDS, limit_seconds / 4))
            try:
                await unary(
                    check,
                    health_pb2.HealthCheckRequest(),
                    timeout_seconds=min(_ATTEMPT_SECONDS, limit_seconds),
                    on_lost=StoreUnavailable,
                )
                last_answer = clock()
            except OctavoError:
                # Looked at here only, so that a supervisor that was stopped itself asks once more.
                if clock() - last_answer >= limit_seconds:
                    return


async def _wait_for_line(probe: HttpGet | ValkeyPing) -> None:
    while True:
        if await _answers_well(probe):
            return
        await asyncio.sleep(_INTERVAL_SECONDS)


async def _wait_for_grpc(probe: GrpcHealth) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with make_channel(probe.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        while True:
            try:
                response = await unary(
                    check,
                    health_pb2.HealthCheckRequest(),
                    timeout_seconds=_ATTEMPT_SECONDS,
                    on_lost=StoreUnavailable,
                )
                if response.status == serving:
                    return
            except OctavoError:
                # Not listening yet.
                pass
            await asyncio.sleep(_INTERVAL_SECONDS)


async def _answers_well(probe: HttpGet | ValkeyPing) -> bool:
    try:
        async with asyncio.timeout(_ATTEMPT_SECONDS):
            line = await _first_line(probe)
    except (OSError, TimeoutError, ValueError):
        # ValueError: a first line longer than any that we know.
        return False
    if isinstance(probe, ValkeyPing):
        return line == b"+PONG\r\n"
    return line.split(b" ")[1:2] == [b"200"]


async def _first_line(probe: HttpGet | ValkeyPing) -> bytes:
    if isinstance(probe, ValkeyPing):
        reader, writer = await asyncio.open_unix_connection(str(probe.socket_path))
        question = b"PING\r\n"
    else:
        reader, writer = await asyncio.open_connection(probe.host, probe.port)
        question = f"GET {probe.path} HTTP/1.1\r\nHost: {probe.host}\r\nConnection: close\r\n\r\n".encode()
    try:
        writer.write(question)
        return await reader.readline()
    finally:
        writer.close()
