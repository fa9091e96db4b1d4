"""Several gateway processes on one port: ``octavo gateway --gateway-processes N``.

Owns the processes: each has a gateway id, and with it a spool, of its own; the kernel spreads connections over
them (SO_REUSEPORT). One that ends while nobody asked for it is started again under its id, so that it closes what
the one before left open. It must not know what a gateway does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.errors import InternalError
from libs.lifecycle import SUPERVISED_VARIABLE, HeartbeatPipe, Lifecycle
from libs.obs import get_logger

log = get_logger("process_group")

_FIRST_DELAY_SECONDS: Final = 0.1
_MAX_DELAY_SECONDS: Final = 5.0
# What has lived so long can start; what never has and failed so often will fail again.
_STARTED_SECONDS: Final = 10.0
_MAX_FAILED_STARTS: Final = 3
# More restarts of one process within a minute mean that it will not get better.
_MAX_RESTARTS: Final = 12
_WINDOW_SECONDS: Final = 60.0
_CODE: Final = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What a group is made of."""

    num_processes: int
    gateway_id: str
    host: str
    port: int
    grpc_host: str
    grpc_port: int
    # The folder in which the processes share their counts.
    shared_folder: Path
    # A process that gives no sign of life for so long is killed.
    silence_seconds: float
    # What a process may take to end once it was asked to.
    stop_seconds: float


async def run_group(settings: GroupSettings, argv: Sequence[str], lifecycle: Lifecycle) -> None:
    """Run gateways with the flags ``argv`` until the process is asked to stop, and let all of them drain.

    Raises:
        InternalError: the port cannot be had, or a process does not stay alive.
    """
    # Counts of an earlier group: a group begins anew as any process does.
    shutil.rmtree(settings.shared_folder, ignore_errors=True)
    with ExitStack() as stack:
        port = stack.enter_context(_reserved_port(settings.host, settings.port))
        grpc_port = stack.enter_context(_reserved_port(settings.grpc_host, settings.grpc_port))
        members = [
            _Member(name, [*argv, *_flags(settings, name, port, grpc_port)], settings)
            for name in (f"{settings.gateway_id}-{index}" for index in range(settings.num_processes))
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(member.run()) for member in members]
            await lifecycle.wait_for_shutdown()
            await asyncio.gather(*(member.stop() for member in members))
            for task in running:
                task.cancel()


class _Member:
    """One process and those that follow it under its name."""

    def __init__(self, name: str, flags: Sequence[str], settings: GroupSettings) -> None:
        self._name = name
        self._flags = flags
        self._settings = settings
        self._process: Process | None = None
        self._is_stopping = False
        self._has_started = False
        self._restart_times: deque[float] = deque(maxlen=_MAX_RESTARTS)

    async def run(self) -> None:
        """Start the process, and again whenever it has ended; raises InternalError when that does not help."""
        loop = asyncio.get_running_loop()
        delay_seconds = _FIRST_DELAY_SECONDS
        try:
            while not self._is_stopping:
                started_at = loop.time()
                exit_code = await self._live_once()
                if self._is_stopping:
                    return
                log.warning("gateway process ended", gateway_id=self._name, exit_code=exit_code)
                lived_seconds = loop.time() - started_at
                self._check_restarts(lived_seconds, loop.time())
                is_new = lived_seconds > _WINDOW_SECONDS
                delay_seconds = _FIRST_DELAY_SECONDS if is_new else min(2 * delay_seconds, _MAX_DELAY_SECONDS)
                await asyncio.sleep(delay_seconds)
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    async def _live_once(self) -> int:
        """Start the process and return its exit code; a frozen one would go on taking callers, and is killed."""
        with closing(HeartbeatPipe()) as heartbeat:
            process = self._process = await _start(self._flags, heartbeat)
            watch = asyncio.create_task(self._kill_when_silent(process, heartbeat))
            try:
                return await process.wait()
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def _kill_when_silent(self, process: Process, heartbeat: HeartbeatPipe) -> None:
        silence_seconds = self._settings.silence_seconds
        await heartbeat.wait_until_silent(silence_seconds)
        log.error(
            "gateway process gives no sign of life and is killed",
            gateway_id=self._name,
            silent_seconds=silence_seconds,
        )
        process.kill()

    async def stop(self) -> None:
        """Ask the process to drain and wait for its end; one that takes too long is killed."""
        self._is_stopping = True
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(self._settings.stop_seconds):
                await self._process.wait()
        except TimeoutError:
            log.warning("gateway process outlived its drain", gateway_id=self._name)
            self._process.kill()

    def _check_restarts(self, lived_seconds: float, now: float) -> None:
        self._has_started = self._has_started or lived_seconds > _STARTED_SECONDS
        if not self._has_started and len(self._restart_times) + 1 == _MAX_FAILED_STARTS:
            raise InternalError(f"{self._name} ended {_MAX_FAILED_STARTS} times soon after its start; see its log.")
        is_full = len(self._restart_times) == _MAX_RESTARTS
        if is_full and now - self._restart_times[0] < _WINDOW_SECONDS:
            raise InternalError(f"{self._name} ended {_MAX_RESTARTS + 1} times within a minute; its log says why.")
        self._restart_times.append(now)


def _flags(settings: GroupSettings, name: str, port: int, grpc_port: int) -> list[str]:
    """Return what one process has of its own; the last of two equal flags counts."""
    flags: Mapping[str, str] = {
        "gateway-processes": "1",
        "gateway-id": name,
        "port": str(port),
        "grpc-port": str(grpc_port),
        "group-folder": str(settings.shared_folder),
    }
    return [f"--{flag}={value}" for flag, value in flags.items()]


async def _start(flags: Sequence[str], heartbeat: HeartbeatPipe) -> Process:
    environment = {
        **os.environ,
        **heartbeat.environ,
        # The process ends with this one.
        SUPERVISED_VARIABLE: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join([str(_CODE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # A folder named "services" where the user stands is not ours.
        "-P",
        *("-m", "services.cli", "gateway", *flags),
        env=environment,
        pass_fds=(heartbeat.write_fd,),
        # Ctrl-C in a terminal reaches only this process, which tells the others once. A supervisor has given it a
        # process group already, and kills that as a whole when this process is frozen.
        preexec_fn=None if SUPERVISED_VARIABLE in os.environ else os.setpgrp,
    )


@contextmanager
def _reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold a port that others may share; who only binds it gets no connections. 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((host, port))
        except OSError as error:
            raise InternalError(f"Cannot listen on {host}:{port}: {error.strerror}.") from error
        yield holder.getsockname()[1]
