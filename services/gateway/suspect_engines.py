"""Engines that did not take or broke off what this gateway sent them, for a while. Pure; the clock is passed in.

A router sees that an engine lives; it cannot see that this gateway does not reach it. Such an engine looks idle, so
without this every next request would be sent there first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_MAX_SUSPECTS: Final = 1_024


class SuspectEngines:
    """Remembers engines for a time; of more than the bound, the latest ones."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        # Until when, the earliest first.
        self._until: OrderedDict[str, float] = OrderedDict()

    @property
    def engine_ids(self) -> frozenset[str]:
        """The engines that get nothing while there are others."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return frozenset(self._until)

    def suspect(self, engine_id: str) -> None:
        """Note that an engine failed a request."""
        self._until[engine_id] = self._clock() + self._seconds
        self._until.move_to_end(engine_id)
        if len(self._until) > _MAX_SUSPECTS:
            self._until.popitem(last=False)

    def trust(self, engine_id: str) -> None:
        """Note that an engine has served a request."""
        self._until.pop(engine_id, None)
