"""Run a tier's main coroutine under signals."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress

import uvloop

from libs.errors import OctavoError
from libs.lifecycle.heartbeat import beat, take_descriptor
from libs.obs import get_logger

# Set by the supervisor to its process id for its children.
SUPERVISED_VARIABLE = "OCTAVO_SUPERVISOR_PID"

_PR_SET_PDEATHSIG = 1
_EXIT_FORCED = 130
_MORE_THAN_ANYBODY_NEEDS = 65_536
_EXIT_FAILED = 1


class Lifecycle:
    """Signals as events. ``draining`` is set at the first SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        # Runs as long as the event loop does; a task that nobody holds may be collected.
        self.beating: asyncio.Task[None] | None = None

    async def wait_for_shutdown(self) -> None:
        """Return when the process is asked to stop."""
        await self.draining.wait()

    def on_signal(self) -> None:
        """Begin to drain; leave at once when that was asked before."""
        if self.draining.is_set():
            os._exit(_EXIT_FORCED)
        self.draining.set()


def run(main: Callable[[Lifecycle], Coroutine[None, None, None]], *, tier: str) -> None:
    """Run ``main`` on uvloop until it returns, and exit non-zero with one clear line when it fails."""
    _die_with_parent()
    _allow_open_files()
    heartbeat_fd = take_descriptor(os.environ)
    log = get_logger(tier)

    async def under_signals() -> None:
        lifecycle = Lifecycle()
        if heartbeat_fd is not None:
            lifecycle.beating = asyncio.create_task(beat(heartbeat_fd))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lifecycle.on_signal)
        await main(lifecycle)

    try:
        uvloop.run(under_signals())
    except (OctavoError, BaseExceptionGroup) as error:
        ours = _ours(error)
        if not ours:
            raise
        for each in ours:
            log.error("process failed", error=each.message, error_class=type(each).__name__)
        sys.exit(_EXIT_FAILED)


def max_open_files() -> int:
    """Return how many files and connections this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MORE_THAN_ANYBODY_NEEDS if soft == resource.RLIM_INFINITY else min(soft, _MORE_THAN_ANYBODY_NEEDS)


def _allow_open_files() -> None:
    """Take as many open files as the system lets a process have: shells give it fewer, for programs of long ago."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MORE_THAN_ANYBODY_NEEDS if hard == resource.RLIM_INFINITY else min(hard, _MORE_THAN_ANYBODY_NEEDS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # Some systems name a limit that they do not allow.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _ours(error: BaseException) -> list[OctavoError]:
    """Return the errors of ours in what a task group raised; none when a fault is among them."""
    if isinstance(error, OctavoError):
        return [error]
    if not isinstance(error, BaseExceptionGroup):
        return []
    found = [_ours(each) for each in error.exceptions]
    return [each for errors in found for each in errors] if all(found) else []


def _die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the supervisor dies, and leave if it is already gone (Linux only)."""
    supervisor = os.environ.get(SUPERVISED_VARIABLE)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(supervisor):
        sys.exit(_EXIT_FAILED)
