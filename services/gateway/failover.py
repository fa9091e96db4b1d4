"""One request's generation, wherever it runs: placing, submitting, and placing again before the first token.

Owns which engine serves a request now and what happens when that engine fails. It must not know text or HTTP. An
engine lost after the first token ends the request with its error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Collection, Sequence
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
from services.gateway.engine_streams import EngineRequest, EngineStreams, Relay
from services.gateway.engine_times import Journey
from services.gateway.generation import ChoiceStep, EngineUsage, Submission, TokenLogprob
from services.gateway.peers import PlacementAsk
from services.gateway.placement import Place, Placements
from services.gateway.suspect_engines import SuspectEngines

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
    # How long an engine that a request did not reach gets none while there are others.
    suspicion_seconds: float


class Generations:
    """Starts generations."""

    def __init__(self, placements: Placements, streams: EngineStreams, settings: FailoverSettings) -> None:
        self._placements = placements
        self._streams = streams
        self._settings = settings
        self._suspects = SuspectEngines(settings.suspicion_seconds, time.monotonic)

    def new(self, ask: PlacementAsk, submission: Submission, *, deadline: float, news: asyncio.Event) -> Generation:
        """Return a generation that has not started.

        ``deadline`` is on the event loop's clock; ``news`` is set when the generation has something to take.
        """
        return Generation(
            self._placements, self._streams, self._suspects, self._settings, ask, submission, deadline, news
        )


class Generation:
    """One request's tokens until its one end. Whoever makes one calls ``stop`` when done, whatever happened."""

    def __init__(
        self,
        placements: Placements,
        streams: EngineStreams,
        suspects: SuspectEngines,
        settings: FailoverSettings,
        ask: PlacementAsk,
        submission: Submission,
        deadline: float,
        news: asyncio.Event,
    ) -> None:
        self._placements = placements
        self._streams = streams
        self._suspects = suspects
        self._settings = settings
        self._ask = ask
        self._submission = submission
        self._deadline = deadline
        self._news = news
        self._has_started = False
        self._place: Place | None = None
        self._request: EngineRequest | None = None
        self.num_retries = 0
        # The way to the first token; with the marks of the last try where timings were asked for.
        self.journey = Journey()

    @property
    def engine_id(self) -> str:
        """The engine that has the request or had it last; empty before there was one."""
        return "" if self._place is None else self._place.choice.engine_id

    @property
    def usage(self) -> EngineUsage | None:
        """What the engine says that the request cost, of the choices that have ended; None while none has."""
        return None if self._request is None else self._request.usage

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs on an engine: the request ended there or never came to one."""
        return self._request is None or self._request.has_ended

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """Those of the prompt's tokens after the first, where wanted; all are there with the first output token."""
        return () if self._request is None else self._request.prompt_logprobs

    @property
    def num_received_tokens(self) -> int:
        """Tokens that came from the engine, read or not."""
        return 0 if self._request is None else self._request.num_received_tokens

    @property
    def num_choices(self) -> int:
        """How many choices were asked for."""
        return self._submission.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is, in tokens."""
        return len(self._submission.prompt_token_ids)

    @property
    def usages(self) -> list[EngineUsage | None]:
        """What the engine says that each choice cost, as far as it has."""
        return [] if self._request is None else self._request.usages

    async def start(self) -> None:
        """Find an engine, submit, and return when the first tokens or an end have come.

        An engine that fails before that is replaced: first by another one, then by any.

        Raises:
            OctavoError: there is no place, or the last engine tried failed; DeadlineExceeded in time.
        """
        async with _until(self._deadline):
            asked_ns = self.journey.asked_ns = time.monotonic_ns()
            self._place = await self._first_place()
            self.journey.placement_ns = time.monotonic_ns() - asked_ns
            while not self._has_started:
                tried_ns = time.monotonic_ns()
                try:
                    await self._attempt(self._place)
                except _RETRYABLE as error:
                    if isinstance(error, EngineLost):
                        self._suspects.suspect(self._place.choice.engine_id)
                    if self.num_retries >= self._settings.max_retries:
                        raise
                    self._place = await self._place_again(self._place, error)
                    self.journey.retry_ns += time.monotonic_ns() - tried_ns
                else:
                    self._suspects.trust(self._place.choice.engine_id)
                    self._has_started = True

    def take(self) -> list[ChoiceStep]:
        """Take what has come of the choices since the last time; nothing before ``start`` has returned."""
        if self._request is None or not self._has_started:
            return []
        return self._request.take()

    def relay_choice(self, choice_index: int, relay: Relay | None) -> None:
        """Let tokens of a choice go to ``relay`` as they come, while nobody takes; None ends that."""
        if self._request is not None:
            self._request.relay_choice(choice_index, relay)

    def stop_choice(self, choice_index: int) -> None:
        """End one choice; the others go on."""
        if self._request is not None:
            self._request.abort_choice(choice_index)

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

    async def _attempt(self, place: Place) -> None:
        """Submit to one engine and wait for its first tokens; raises the engine's error if it fails before."""
        remaining_seconds = self._deadline - asyncio.get_running_loop().time()
        self._request = self._streams.submit(
            place.choice.address, self._submission, remaining_seconds=remaining_seconds, news=self._news
        )
        self.journey.current = self._request.times
        try:
            async with asyncio.timeout(self._settings.accept_timeout_seconds):
                await self._request.wait_accepted()
        except TimeoutError:
            raise EngineLost("The engine did not take the request in time.") from None
        await self._request.wait_begun()
        if self._request.early_failure is not None:
            raise self._request.early_failure
        place.mark_started()

    async def _first_place(self) -> Place:
        suspects = self._suspects.engine_ids
        if suspects and self._placements.knows_engine_beside(suspects):
            return await self._place_beside(suspects)
        return await self._placements.place(self._ask, deadline=self._deadline)

    async def _place_again(self, failed: Place, error: OctavoError) -> Place:
        """Give the failed engine up and find another one."""
        log.warning(
            "request is placed again",
            request_id=self._ask.request_id,
            engine_id=failed.choice.engine_id,
            error=error.message,
        )
        self.stop()
        self.num_retries += 1
        return await self._place_beside({failed.choice.engine_id, *self._suspects.engine_ids})

    async def _place_beside(self, engine_ids: Collection[str]) -> Place:
        """Find an engine that is none of these; where there is no other, any."""
        elsewhere = dataclasses.replace(self._ask, excluded_engine_ids=tuple(sorted(engine_ids)))
        try:
            async with asyncio.timeout(self._settings.retry_placement_timeout_seconds):
                return await self._placements.place(elsewhere, deadline=self._deadline)
        except (NoEngineAvailable, TimeoutError):
            # One of them may have come back by now.
            await asyncio.sleep(_BACKOFF_SECONDS)
            return await self._placements.place(self._ask, deadline=self._deadline)


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise deadline_exceeded() from None


def deadline_exceeded() -> DeadlineExceeded:
    """Return the error of a request whose time is over."""
    return DeadlineExceeded("The request did not finish in the time that this server gives it.")
