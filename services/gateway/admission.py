"""Admission at the gateway: how many requests may be inside, and the way out when the process ends.

Owns the count, the drain, and the interruption of requests that outlive it. It must not know what a request is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from libs.errors import Draining, OctavoError, Overloaded

_OVERLOAD_RETRY_SECONDS = 1.0
_DRAINING_RETRY_SECONDS = 5.0


class AdmissionSlot:
    """One admitted request and the task that serves it; it holds as many places as it has prompts."""

    def __init__(self, task: asyncio.Task[Any], admission: Admission) -> None:
        self._task = task
        self._admission = admission
        self.num_places = 1
        self._interruption: OctavoError | None = None

    def interrupt(self, error: OctavoError) -> None:
        """Make the request end with ``error`` at its next wait."""
        if self._interruption is None:
            self._interruption = error
            self._task.cancel()

    def grow(self, num_more: int) -> None:
        """Take further places; raises Overloaded when there are not so many."""
        self._admission.take_places(num_more)
        self.num_places += num_more

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Turn an interruption inside of the block into its error; a client that left is no such."""
        try:
            yield
        except asyncio.CancelledError:
            # More than one pending cancellation means that the client left as well.
            if self._interruption is None or self._task.cancelling() != 1:
                raise
            self._task.uncancel()
            raise self._interruption from None


class Admission:
    """Admits requests up to a bound until it drains."""

    def __init__(self, *, max_requests: int) -> None:
        self._max_requests = max_requests
        self._slots: set[AdmissionSlot] = set()
        self._num_taken = 0
        self._is_draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused for good."""
        return self._is_draining

    @contextmanager
    def admit(self) -> Iterator[AdmissionSlot]:
        """Hold a slot while the current task serves a request.

        Raises:
            Draining: the process is going away.
            Overloaded: all slots are taken.
        """
        if self._is_draining:
            raise draining_error()
        task = asyncio.current_task()
        assert task is not None, "requests are served by tasks"
        self.take_places(1)
        slot = AdmissionSlot(task, self)
        self._slots.add(slot)
        self._empty.clear()
        try:
            yield slot
        finally:
            self._slots.discard(slot)
            self._num_taken -= slot.num_places
            if not self._slots:
                self._empty.set()

    def take_places(self, num_places: int) -> None:
        """Take places for a slot; raises Overloaded when there are not so many."""
        if self._num_taken + num_places > self._max_requests:
            raise Overloaded(
                f"The gateway serves {self._num_taken} prompts of at most {self._max_requests} already, so "
                f"{num_places} more do not fit; try again shortly.",
                retry_after_seconds=_OVERLOAD_RETRY_SECONDS,
            )
        self._num_taken += num_places

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_empty(self, timeout_seconds: float) -> bool:
        """Wait until no request is inside; False when some still are after the time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def interrupt_all(self, error: OctavoError) -> int:
        """Make all requests end with ``error``; returns how many there were."""
        slots = list(self._slots)
        for slot in slots:
            slot.interrupt(error)
        return len(slots)


def draining_error() -> Draining:
    """Return the error of a process that is going away."""
    return Draining(
        "This server is shutting down and takes no new requests; send it again shortly.",
        retry_after_seconds=_DRAINING_RETRY_SECONDS,
    )
