"""One supervised process: started, watched, its output taken, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from libs.lifecycle import HeartbeatPipe
from libs.obs import get_logger
from services.supervisor.output import ProcessOutput
from services.supervisor.plan import ProcessPlan
from services.supervisor.probes import wait_until_healthy, wait_until_silent

_READ_BYTES = 65_536
# A process that ended may have left its pipe to another; its last words are waited for so long.
_LAST_OUTPUT_SECONDS = 1.0
_KILL_WAIT_SECONDS = 5.0
_READY_INTERVAL_SECONDS = 0.5
log = get_logger("supervisor")

_SHIM = Path(__file__).with_name("exec_with_parent.py")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every process is started with."""

    environ: Mapping[str, str]
    # Kept open in every process: the lock of the data folder.
    lock_fd: int


@dataclass(frozen=True, slots=True)
class LifeEvents:
    """Who is told what happens in one life of a process."""

    on_started: Callable[[], None]
    on_healthy: Callable[[], None]
    # It has done what its start is about: healthy, or more, by its plan.
    on_ready: Callable[[], None]


class SupervisedProcess:
    """A process by its plan; ``run_once`` is one life of it."""

    def __init__(self, plan: ProcessPlan, surroundings: Surroundings, output: ProcessOutput) -> None:
        self.plan = plan
        self.output = output
        self.num_restarts = 0
        self.healthy = asyncio.Event()
        self._surroundings = surroundings
        self._process: Process | None = None
        self._heartbeat: HeartbeatPipe | None = None
        self._ended = asyncio.Event()
        self._ended.set()
        # Held while a process is being made, so that an end asked for in between finds it.
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._process is None else self._process.pid

    async def run_once(self, events: LifeEvents) -> int:
        """Start the process and return its exit code, negative for a signal, when it has ended.

        Raises:
            OSError: when no process can be made.
        """
        async with self._starting:
            process = await self._start()
        events.on_started()
        relay = asyncio.create_task(self._relay(process))
        health = asyncio.create_task(self._watch_health(events))
        try:
            return await process.wait()
        except asyncio.CancelledError:
            self.kill()
            raise
        finally:
            self.healthy.clear()
            self._process = None
            self._ended.set()
            health.cancel()
            _, late = await asyncio.wait([relay, health], timeout=_LAST_OUTPUT_SECONDS)
            for task in late:
                task.cancel()
            if self._heartbeat is not None:
                self._heartbeat.close()
                self._heartbeat = None
            self.output.end_of_process()

    async def stop(self, grace_seconds: float) -> bool:
        """Ask the process to end and kill it when it does not; False when it had to be killed."""
        async with self._starting:
            self._signal(signal.SIGTERM)
        if await self._has_ended(grace_seconds):
            return True
        self.kill()
        await self._has_ended(_KILL_WAIT_SECONDS)
        return False

    def kill(self) -> None:
        """Kill the process and all that it started."""
        if (pid := self.pid) is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                # It has no group of its own in its first milliseconds.
                self._signal(signal.SIGKILL)

    async def _start(self) -> Process:
        if self.plan.socket_path is not None:
            self.plan.socket_path.unlink(missing_ok=True)
        # -I -S: the shim needs the standard library only, and should cost little.
        heartbeat = self._heartbeat = HeartbeatPipe() if self.plan.has_heartbeat else None
        shim = (sys.executable, "-I", "-S", str(_SHIM), str(self.plan.niceness))
        self._process = await asyncio.create_subprocess_exec(
            *shim,
            *self.plan.command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env={
                **self._surroundings.environ,
                **self.plan.environ,
                **({} if heartbeat is None else heartbeat.environ),
            },
            pass_fds=(self._surroundings.lock_fd, *([] if heartbeat is None else [heartbeat.write_fd])),
        )
        self._ended.clear()
        return self._process

    async def _has_ended(self, timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                # It ended on its own a moment ago.
                return

    async def _relay(self, process: Process) -> None:
        assert process.stdout is not None, "stdout was asked for as a pipe"
        while data := await process.stdout.read(_READ_BYTES):
            self.output.feed(data)

    async def _watch_health(self, events: LifeEvents) -> None:
        await wait_until_healthy(self.plan.probe)
        self.healthy.set()
        events.on_healthy()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_readiness(events))
            tasks.create_task(self._kill_when_silent())

    async def _watch_readiness(self, events: LifeEvents) -> None:
        if self.plan.ready_probe is not None:
            # For as long as a model loads, which needs the processor more.
            await wait_until_healthy(self.plan.ready_probe, _READY_INTERVAL_SECONDS)
        events.on_ready()

    async def _kill_when_silent(self) -> None:
        limit_seconds = self.plan.silence_limit_seconds
        if limit_seconds is None:
            return
        if self._heartbeat is not None:
            await self._heartbeat.wait_until_silent(limit_seconds)
        else:
            await wait_until_silent(self.plan.probe, limit_seconds)
        log.error("process does not answer and is killed", process=self.plan.name, silent_seconds=limit_seconds)
        self.kill()
