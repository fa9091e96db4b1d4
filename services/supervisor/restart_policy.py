"""When a process that ended is started again, and when all is given up. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# argparse and octavo's own commands leave with this code for a configuration that cannot be used.
EXIT_CODE_CONFIG = 2
# Beyond any delay; a greater power is no number at some point.
_MAX_DOUBLINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """The numbers of a restart policy."""

    first_delay_seconds: float = 0.1
    max_delay_seconds: float = 5.0
    # A process that lived this long starts again with the first delay.
    reset_after_seconds: float = 10.0
    max_restarts: int = 12
    window_seconds: float = 60.0
    # A process that was never ready may fail so often: what failed thrice will fail again.
    max_failed_starts: int = 3
    # One that was ready before and is not again waits longer each time, however long it takes to fail.
    max_failed_delay_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start the process again after a delay."""

    delay_seconds: float
    # Of its last lives, those that ended before it was ready.
    num_failed_starts: int = 0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop everything, for a reason that continues the sentence "gateway …"."""

    reason: str


class RestartPolicy:
    """The history of one process and what follows from it."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._started_at = 0.0
        self._is_ready = False
        self._was_ever_ready = False
        # Of the last lives, those that ended before the process was ready.
        self.num_failed_starts = 0
        self._delay_seconds = limits.first_delay_seconds
        self._restart_times: deque[float] = deque(maxlen=limits.max_restarts)

    def on_started(self, now: float) -> None:
        """Note that the process was started."""
        self._started_at = now
        self._is_ready = False

    def on_ready(self) -> None:
        """Note that the process has done what its start is about, such as loading a model."""
        self._is_ready = self._was_ever_ready = True
        self.num_failed_starts = 0

    def on_exit(self, exit_code: int, now: float) -> RestartAfter | GiveUp:
        """Decide what follows an exit that nobody asked for; ``exit_code`` is negative for a signal."""
        how = describe_exit(exit_code)
        if not self._is_ready:
            self.num_failed_starts += 1
        if not self._was_ever_ready:
            if exit_code == EXIT_CODE_CONFIG:
                return GiveUp(f"refused its configuration ({how})")
            if self.num_failed_starts >= self._limits.max_failed_starts:
                return GiveUp(f"ended {self.num_failed_starts} times before it was ever ready ({how})")
        while self._restart_times and now - self._restart_times[0] > self._limits.window_seconds:
            self._restart_times.popleft()
        if len(self._restart_times) == self._limits.max_restarts:
            return GiveUp(
                f"ended more than {self._limits.max_restarts} times within "
                f"{self._limits.window_seconds:g} seconds ({how})"
            )
        self._restart_times.append(now)
        if self.num_failed_starts and self._was_ever_ready:
            doubled = self._limits.first_delay_seconds * 2.0 ** min(self.num_failed_starts, _MAX_DOUBLINGS)
            return RestartAfter(min(doubled, self._limits.max_failed_delay_seconds), self.num_failed_starts)
        if now - self._started_at >= self._limits.reset_after_seconds:
            self._delay_seconds = self._limits.first_delay_seconds
        delay = self._delay_seconds
        self._delay_seconds = min(2 * delay, self._limits.max_delay_seconds)
        return RestartAfter(delay)


def describe_exit(exit_code: int) -> str:
    """Say how a process ended, for people."""
    return f"exit code {exit_code}" if exit_code >= 0 else f"killed by signal {-exit_code}"
