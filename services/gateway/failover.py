"""One request's generation, wherever it runs: placing, submitting, and placing again before the first token.

Owns which engine serves a request now and what happens when that engine fails. It must not know text or HTTP. An
engine lost after the first token ends the request with its error.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from libs.errors import (
    DeadlineExceeded,
    Draining,
    EngineLost,
    NoEngineAvailable,
    OctavoError,
    Overloaded,
    WorkerLost,
)
from libs.obs import get_logger
from services.gateway.engine_streams import EngineRequest, EngineStreams
from services.gateway.generation import EngineUsage, GenerationFailed, GenerationStep, Submission
from services.gateway.peers import PlacementAsk
from services.gateway.placement import Place, Placements

log = get_logger("failover")

# Errors of one engine that another may not have; NoEngineAvailable is said by one that loads its model again.
_RETRYABLE = (EngineLost, WorkerLost, Draining, NoEngineAvailable, Overloaded)
_BACKOFF_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """How long and how often a request without a token looks for an engine."""

    max_retries: int
    retry_placement_timeout_seconds: float
    accept_timeout_seconds: float


class Generations:
    """Starts generations."""

    def __init__(self, placements: Placements, streams: EngineStreams, settings: FailoverSettings) -> None:
        self._placements = placements
        self._streams = streams
        self._settings = settings

    def new(self, ask: PlacementAsk, submission: Submission, *, deadline: float) -> Generation:
        """Return a generation that has not started; ``deadline`` is on the event loop's clock."""
        return Generation(self._placements, self._streams, self._settings, ask, submission, deadline)


class Generation:
    """One request's tokens until its one end. Whoever makes one calls ``stop`` when done, whatever happened."""

    def __init__(
        self,
        placements: Placements,
        streams: EngineStreams,
        settings: FailoverSettings,
        ask: PlacementAsk,
        submission: Submission,
        deadline: float,
    ) -> None:
        self._placements = placements
        self._streams = streams
        self._settings = settings
        self._ask = ask
        self._submission = submission
        self._deadline = deadline
        self._place: Place | None = None
        self._request: EngineRequest | None = None
        self.num_retries = 0

    @property
    def engine_id(self) -> str:
        """The engine that has the request or had it last; empty before there was one."""
        return "" if self._place is None else self._place.choice.engine_id

    @property
    def usage(self) -> EngineUsage | None:
        """What the engine says that the request cost; None until it ended."""
        end = None if self._request is None else self._request.end
        return None if end is None else end.usage

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs on an engine: the request ended there or never came to one."""
        return self._request is None or self._request.end is not None

    @property
    def num_received_tokens(self) -> int:
        """Tokens that came from the engine, read or not."""
        return 0 if self._request is None else self._request.num_received_tokens

    async def start(self) -> GenerationStep:
        """Find an engine, submit, and return the first step that has tokens or the end.

        An engine that fails before that is replaced: first by another one, then by any.

        Raises:
            OctavoError: there is no place, or the last engine tried failed; DeadlineExceeded in time.
        """
        async with _until(self._deadline):
            self._place = await self._placements.place(self._ask, deadline=self._deadline)
            while True:
                try:
                    return await self._attempt(self._place)
                except _RETRYABLE as error:
                    if self.num_retries >= self._settings.max_retries:
                        raise
                    self._place = await self._place_again(self._place, error)
        raise AssertionError("the loop returns or raises")

    async def next_step(self, timeout_seconds: float) -> GenerationStep | None:
        """Return the next tokens or the end; None when nothing came in time. Safe to cancel.

        Raises:
            OctavoError: the engine failed; DeadlineExceeded when the request's time is over.
        """
        assert self._request is not None, "next_step before start"
        wait_until = asyncio.get_running_loop().time() + timeout_seconds
        try:
            async with asyncio.timeout_at(min(wait_until, self._deadline)):
                return await self._request.next_step()
        except TimeoutError:
            if wait_until >= self._deadline:
                raise _deadline_exceeded() from None
            return None

    def stop(self) -> None:
        """End what still runs and give the place back."""
        if self._request is not None:
            self._request.abort()
        if self._place is not None:
            self._place.release()

    async def settle(self, timeout_seconds: float) -> None:
        """Wait until the engine has said what the request cost, but not for long."""
        if self._request is None:
            return
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._request.wait_ended()
        except TimeoutError:
            log.warning(
                "engine did not confirm an abort", request_id=self._ask.request_id, engine_id=self.engine_id
            )

    async def _attempt(self, place: Place) -> GenerationStep:
        """Submit to one engine and wait for its first tokens; raises the engine's error if it fails before."""
        remaining_seconds = self._deadline - asyncio.get_running_loop().time()
        self._request = self._streams.submit(
            place.choice.address, self._submission, remaining_seconds=remaining_seconds
        )
        try:
            async with asyncio.timeout(self._settings.accept_timeout_seconds):
                await self._request.wait_accepted()
        except TimeoutError:
            raise EngineLost("The engine did not take the request in time.") from None
        step = await self._request.next_step()
        if isinstance(step.end, GenerationFailed) and not step.token_ids:
            raise step.end.error
        place.mark_started()
        return step

    async def _place_again(self, failed: Place, error: OctavoError) -> Place:
        """Give the failed engine up and find another one; where there is no other, any."""
        log.warning(
            "request is placed again",
            request_id=self._ask.request_id,
            engine_id=failed.choice.engine_id,
            error=error.message,
        )
        self.stop()
        self.num_retries += 1
        elsewhere = dataclasses.replace(self._ask, excluded_engine_ids=(failed.choice.engine_id,))
        try:
            async with asyncio.timeout(self._settings.retry_placement_timeout_seconds):
                return await self._placements.place(elsewhere, deadline=self._deadline)
        except (NoEngineAvailable, TimeoutError):
            # The failed engine may have come back by now.
            await asyncio.sleep(_BACKOFF_SECONDS)
            return await self._placements.place(self._ask, deadline=self._deadline)


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise _deadline_exceeded() from None


def _deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("The request did not finish in the time that this server gives it.")
