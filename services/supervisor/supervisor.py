"""Keep the planned processes alive until asked to stop, then end them in order.

Owns restarts, readiness and the order of the end. It must not know what a tier does, nor how ``octavo up`` was
typed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from itertools import groupby
from typing import Any

from libs.obs import get_logger
from services.supervisor.failures import UpFailed
from services.supervisor.process import LifeEvents, SupervisedProcess
from services.supervisor.restart_policy import GiveUp, RestartAfter, RestartLimits, RestartPolicy

_PROGRESS_INTERVAL_SECONDS = 10.0

log = get_logger("supervisor")


class Supervisor:
    """All processes of one ``octavo up``."""

    def __init__(
        self,
        processes: Sequence[SupervisedProcess],
        limits: RestartLimits,
        *,
        on_change: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._processes = list(processes)
        self._limits = limits
        self._on_change = on_change
        self._on_ready = on_ready
        self._by_name = {process.plan.name: process for process in processes}
        self._stopping = asyncio.Event()
        self._failure: str | None = None

    async def run(self, stop_requested: asyncio.Event, ready_timeout_seconds: float) -> None:
        """Run until ``stop_requested`` or until something cannot be kept alive; no process is left then.

        Raises:
            UpFailed: when it stopped for a reason of its own, or a process had to be killed at the end.
        """
        async with asyncio.TaskGroup() as tasks:
            for process in self._processes:
                tasks.create_task(self._keep_alive(process))
            readiness = tasks.create_task(self._announce_readiness(ready_timeout_seconds))
            requested = tasks.create_task(stop_requested.wait())
            failed = tasks.create_task(self._stopping.wait())
            await asyncio.wait([requested, failed], return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            readiness.cancel()
            requested.cancel()
            killed = await self._stop_in_order()
        if self._failure is not None:
            raise UpFailed(self._failure)
        if killed:
            raise UpFailed(f"These processes did not end in time and were killed: {', '.join(killed)}.")

    def kill_all(self) -> None:
        """Kill every process now."""
        for process in self._processes:
            process.kill()

    async def _keep_alive(self, process: SupervisedProcess) -> None:
        plan, policy = process.plan, RestartPolicy(self._limits)
        for name in plan.start_after:
            await self._unless_stopping(self._by_name[name].healthy.wait())

        def on_started() -> None:
            policy.on_started(time.monotonic())
            log.info("process started", process=plan.name, pid=process.pid)
            self._on_change()

        def on_healthy() -> None:
            log.info("process healthy", process=plan.name)
            self._on_change()

        def on_ready() -> None:
            if policy.num_failed_starts:
                log.info("process ready again", process=plan.name, num_failed_starts=policy.num_failed_starts)
            policy.on_ready()

        while not self._stopping.is_set():
            try:
                exit_code = await process.run_once(LifeEvents(on_started, on_healthy, on_ready))
            except OSError as error:
                self._fail(process, f"cannot be started: {error}")
                return
            self._on_change()
            if self._stopping.is_set():
                return
            decision = policy.on_exit(exit_code, time.monotonic())
            if isinstance(decision, GiveUp):
                self._fail(process, decision.reason)
                return
            process.num_restarts += 1
            _log_restart(plan.name, exit_code, decision)
            await self._unless_stopping(asyncio.sleep(decision.delay_seconds))

    async def _announce_readiness(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while waiting := self._unready_names():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._failure = (
                    f"Not ready within {timeout_seconds:g} seconds (ready_timeout_seconds); "
                    f"still waiting for: {', '.join(waiting)}."
                )
                self._stopping.set()
                return
            try:
                async with asyncio.timeout(min(remaining, _PROGRESS_INTERVAL_SECONDS)):
                    await self._by_name[waiting[0]].healthy.wait()
            except TimeoutError:
                log.info("waiting for processes", processes=", ".join(waiting))
        self._on_ready()

    def _unready_names(self) -> list[str]:
        return [
            process.plan.name
            for process in self._processes
            if process.plan.gates_readiness and not process.healthy.is_set()
        ]

    async def _stop_in_order(self) -> list[str]:
        """End stage after stage; return the names of those that had to be killed."""
        killed: list[str] = []
        by_stage = sorted(self._processes, key=lambda process: process.plan.stop_stage)
        for _, stage in groupby(by_stage, key=lambda process: process.plan.stop_stage):
            members = list(stage)
            async with asyncio.TaskGroup() as tasks:
                ends = [tasks.create_task(member.stop(member.plan.stop_grace_seconds)) for member in members]
            killed += [member.plan.name for member, end in zip(members, ends, strict=True) if not end.result()]
        return killed

    async def _unless_stopping(self, wait: Coroutine[Any, Any, object]) -> None:
        """Wait for something, or for the end of all."""
        tasks = {asyncio.ensure_future(wait), asyncio.ensure_future(self._stopping.wait())}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _fail(self, process: SupervisedProcess, reason: str) -> None:
        if self._failure is None:
            last_lines = "\n".join(f"  {line}" for line in process.output.tail)
            self._failure = f"{process.plan.name} {reason}. Its last lines:\n{last_lines}"
        self._stopping.set()


def _log_restart(name: str, exit_code: int, decision: RestartAfter) -> None:
    fields = {"process": name, "exit_code": exit_code, "restart_in_seconds": decision.delay_seconds}
    if decision.num_failed_starts:
        log.error(
            "process ended before it was ready again; its own log says why",
            **fields,
            num_failed_starts=decision.num_failed_starts,
        )
    else:
        log.warning("process ended", **fields)
