"""Health checks as effects: ask a process whether it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.errors import OctavoError, StoreUnavailable
from libs.rpc import make_channel, unary
from services.supervisor.plan import GrpcHealth, HttpGet, Probe, ValkeyPing

_ATTEMPT_SECONDS = 2.0
_SILENCE_INTERVAL_SECONDS = 1.0


async def wait_until_healthy(probe: Probe, interval_seconds: float = 0.1) -> None:
    """Return when the process answers well; whoever waits sets the bound by cancelling."""
    if isinstance(probe, GrpcHealth):
        await _wait_for_grpc(probe, interval_seconds)
    else:
        await _wait_for_line(probe, interval_seconds)


async def wait_until_silent(probe: Probe, limit_seconds: float) -> None:
    """Return when the process has answered nothing for so long; a refusal is an answer."""
    timeout_seconds = min(_ATTEMPT_SECONDS, limit_seconds)
    if not isinstance(probe, GrpcHealth):
        await _until_silent(lambda: _says_anything(probe, timeout_seconds), limit_seconds)
        return
    async with make_channel(probe.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        await _until_silent(lambda: _answers(check, timeout_seconds), limit_seconds)


async def _until_silent(has_answered: Callable[[], Awaitable[bool]], limit_seconds: float) -> None:
    clock = asyncio.get_running_loop().time
    last_answer = clock()
    while True:
        await asyncio.sleep(min(_SILENCE_INTERVAL_SECONDS, limit_seconds / 4))
        if await has_answered():
            last_answer = clock()
        # A supervisor that was stopped itself, perhaps in the middle of a question, asks once more.
        elif clock() - last_answer >= limit_seconds and not await has_answered():
            return


async def _answers(check: Any, timeout_seconds: float) -> bool:  # Any: a method of a generated stub.
    try:
        await unary(
            check, health_pb2.HealthCheckRequest(), timeout_seconds=timeout_seconds, on_lost=StoreUnavailable
        )
    except OctavoError:
        return False
    return True


async def _says_anything(probe: HttpGet | ValkeyPing, timeout_seconds: float) -> bool:
    return bool(await _first_line_in_time(probe, timeout_seconds))


async def _wait_for_line(probe: HttpGet | ValkeyPing, interval_seconds: float) -> None:
    while True:
        if await _answers_well(probe):
            return
        await asyncio.sleep(interval_seconds)


async def _wait_for_grpc(probe: GrpcHealth, interval_seconds: float) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with make_channel(probe.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        while True:
            try:
                response = await unary(
                    check,
                    health_pb2.HealthCheckRequest(service=probe.service),
                    timeout_seconds=_ATTEMPT_SECONDS,
                    on_lost=StoreUnavailable,
                )
                if response.status == serving:
                    return
            except OctavoError:
                # Not listening yet.
                pass
            await asyncio.sleep(interval_seconds)


async def _answers_well(probe: HttpGet | ValkeyPing) -> bool:
    line = await _first_line_in_time(probe, _ATTEMPT_SECONDS)
    if isinstance(probe, ValkeyPing):
        return line == b"+PONG\r\n"
    return line.split(b" ")[1:2] == [b"200"]


async def _first_line_in_time(probe: HttpGet | ValkeyPing, timeout_seconds: float) -> bytes:
    """Return the first line of the answer; nothing where none comes."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _first_line(probe)
    except (OSError, TimeoutError, ValueError):
        # ValueError: a first line longer than any that we know.
        return b""


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
