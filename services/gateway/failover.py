"""One request's generation, wherever it runs: placing, submitting, and going on elsewhere when an engine is lost.

Owns which engine serves a request now and what happens when that engine fails. It must not know text or HTTP. What
another engine needs to go on is in ``continuation``; the reader sees one row of tokens, whoever made them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
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
from libs.obs.metrics import GatewayMetrics
from services.gateway.choice_progress import Relay
from services.gateway.continuation import Endurance, continued, continued_ask
from services.gateway.engine_streams import EngineRequest, EngineStreams
from services.gateway.engine_times import EngineStall, Journey
from services.gateway.generation import ChoiceStep, EngineUsage, Submission, TokenLogprob
from services.gateway.peers import PlacementAsk
from services.gateway.placement import Place, Placements
from services.gateway.suspect_engines import SuspectEngines

log = get_logger("failover")

# Errors of one engine that another may not have; NoEngineAvailable is said by one that loads its model again.
_RETRYABLE = (EngineLost, WorkerLost, Draining, NoEngineAvailable, Overloaded)
# Those that end what an engine had begun.
_LOSSES = (EngineLost, WorkerLost)
_BACKOFF_SECONDS = 0.25
# Time for an engine that failed one choice to end the others.
_ABORT_SECONDS = 1.0
_NANOS_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """How long and how often a request looks for another engine."""

    # Before an engine has taken it, and from one token to the next.
    max_retries: int
    retry_placement_timeout_seconds: float
    accept_timeout_seconds: float
    # How long an engine that a request did not reach gets none while there are others.
    suspicion_seconds: float
    # How long a request that lost its engine waits for one that takes it.
    patience_seconds: float


class Generations:
    """Starts generations."""

    def __init__(
        self, placements: Placements, streams: EngineStreams, settings: FailoverSettings, metrics: GatewayMetrics
    ) -> None:
        self._placements = placements
        self._streams = streams
        self._metrics = metrics
        self._settings = settings
        self._suspects = SuspectEngines(settings.suspicion_seconds, time.monotonic)

    def new(self, ask: PlacementAsk, submission: Submission, *, deadline: float, news: asyncio.Event) -> Generation:
        """Return a generation that has not started.

        ``deadline`` is on the event loop's clock; ``news`` is set when the generation has something to take.
        """
        return Generation(
            self._placements,
            self._streams,
            self._suspects,
            self._settings,
            self._metrics,
            ask,
            submission,
            deadline,
            news,
        )


class Generation:
    """One request's tokens until its one end. Whoever makes one calls ``stop`` when done, whatever happened."""

    def __init__(
        self,
        placements: Placements,
        streams: EngineStreams,
        suspects: SuspectEngines,
        settings: FailoverSettings,
        metrics: GatewayMetrics,
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
        self._metrics = metrics
        self._endurance = Endurance(ask.request_id, settings.max_retries, settings.patience_seconds)
        self._place: Place | None = None
        self._request: EngineRequest | None = None
        self.num_retries = 0
        # Since when a request that has tokens has no engine.
        self._interrupted_ns: int | None = None
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
        """Tokens that came from all engines, read or not."""
        return 0 if self._request is None else self._request.num_received_tokens

    @property
    def num_choices(self) -> int:
        """How many choices were asked for."""
        return len(self._submission.choices)

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is, in tokens."""
        return len(self._submission.prompt_token_ids)

    @property
    def usages(self) -> list[EngineUsage | None]:
        """What the engine says that each choice cost, as far as it has."""
        return [] if self._request is None else self._request.usages

    @property
    def told_stalls(self) -> Mapping[int, Sequence[EngineStall]]:
        """The stalls that the latest engine has told, by choice."""
        return {} if self._request is None else self._request.told_stalls

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return self._request is not None and self._request.has_news

    async def run(self) -> None:
        """Have the request served until all its choices have ended: first by one engine, after a loss by another.

        Raises:
            OctavoError: there is no place, or too many engines failed; DeadlineExceeded in time.
        """
        try:
            async with _until(self._deadline):
                asked_ns = self.journey.asked_ns = time.monotonic_ns()
                self._place = place = await self._first_place()
                self.journey.placement_ns = time.monotonic_ns() - asked_ns
                while (failure := await self._try_at(place)) is not None and self._is_wanted:
                    self._place = place = await self._place_after(failure)
        except OctavoError:
            if self._interrupted_ns is not None:
                self._metrics.resumptions.labels("failed").inc()
            raise

    def take(self) -> list[ChoiceStep]:
        """Take what has come of the choices since the last time."""
        return [] if self._request is None else self._request.take()

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

    @property
    def _is_wanted(self) -> bool:
        return self._request is None or self._request.is_wanted

    async def _try_at(self, place: Place) -> _Failure | None:
        """Have one engine serve the request; returns None at its end, or a failure that another may not have."""
        if not self._is_wanted:
            # The reader found all that it wanted in what had come already.
            return None
        tried_ns, request = time.monotonic_ns(), None
        try:
            request = self._submit_to(place)
            await self._wait_accepted(request)
        except _RETRYABLE as error:
            return _Failure(place, error, tried_ns, request)
        await request.wait_begun()
        if request.has_new_tokens or request.failure is None:
            self._note_begun(place)
        await request.wait_over()
        # One error may end many requests: raised by each it would keep all of them.
        if isinstance(request.failure, _RETRYABLE):
            return _Failure(place, request.failure, tried_ns, request)
        if request.failure is not None:
            raise request.failure
        return None

    def _submit_to(self, place: Place) -> EngineRequest:
        earlier, submission = self._request, self._submission
        if earlier is not None:
            submission = continued(submission, earlier.choices)
        request = self._streams.submit(
            place.choice.address,
            submission,
            remaining_seconds=self._deadline - asyncio.get_running_loop().time(),
            news=self._news,
            earlier=earlier,
        )
        self._request = request
        self.journey.begin_try(request.times)
        return request

    async def _wait_accepted(self, request: EngineRequest) -> None:
        try:
            async with asyncio.timeout(self._settings.accept_timeout_seconds):
                await request.wait_accepted()
        except TimeoutError:
            raise EngineLost("The engine did not take the request in time.") from None

    def _note_begun(self, place: Place) -> None:
        """An engine has brought a first token, or the end."""
        place.mark_started()
        self._suspects.trust(place.choice.engine_id)
        if self._interrupted_ns is not None:
            self._metrics.resumptions.labels("resumed").inc()
            self._metrics.resume_seconds.observe((time.monotonic_ns() - self._interrupted_ns) / _NANOS_PER_SECOND)
            self._interrupted_ns = None

    async def _place_after(self, failure: _Failure) -> Place:
        """Find another engine after one failed; raises its error if the request has borne enough."""
        if isinstance(failure.error, EngineLost):
            self._suspects.suspect(failure.place.choice.engine_id)
        pause_seconds = self._pause_after(failure)
        log.warning(
            "request is placed again",
            request_id=self._ask.request_id,
            engine_id=failure.place.choice.engine_id,
            error=failure.error.message,
            num_received_tokens=self.num_received_tokens,
        )
        self.num_retries += 1
        is_before_tokens = not self.num_received_tokens
        if not is_before_tokens:
            self._note_interrupted()
        failure.place.release()
        await failure.give_up()
        await asyncio.sleep(pause_seconds)
        place = await self._patiently_place({failure.place.choice.engine_id, *self._suspects.engine_ids})
        if is_before_tokens:
            self.journey.retry_ns += time.monotonic_ns() - failure.tried_ns
        return place

    def _pause_after(self, failure: _Failure) -> float:
        """Return how long to wait before another engine is asked, in seconds; raises the error if none is to be."""
        if failure.is_loss:
            if not self._endurance.bears_loss(after_token=failure.is_after_token):
                raise failure.error
            return self._endurance.pause_after_loss()
        if not self._endurance.has_lost:
            if self.num_retries >= self._settings.max_retries:
                raise failure.error
            return 0.0
        return self._pause_after_refusal(failure.error)

    def _pause_after_refusal(self, refusal: OctavoError) -> float:
        pause_seconds = self._endurance.pause_after_refusal(time.monotonic())
        if pause_seconds is None:
            raise refusal
        return pause_seconds

    def _note_interrupted(self) -> None:
        now_ns = time.monotonic_ns()
        self.journey.lose(now_ns)
        if self._interrupted_ns is None:
            self._interrupted_ns = now_ns

    async def _first_place(self) -> Place:
        suspects = self._suspects.engine_ids
        if suspects and self._placements.knows_engine_beside(suspects):
            return await self._place_beside(suspects)
        return await self._placements.place(self._ask, deadline=self._deadline)

    async def _patiently_place(self, engine_ids: Collection[str]) -> Place:
        """Find an engine that is rather none of these; a request that lost its engine waits until there is one."""
        while True:
            try:
                return await self._place_beside(engine_ids)
            except (NoEngineAvailable, Overloaded) as refusal:
                if not self._endurance.has_lost:
                    raise
                await asyncio.sleep(self._pause_after_refusal(refusal))

    async def _place_beside(self, engine_ids: Collection[str]) -> Place:
        """Find an engine that is none of these; where there is no other, any."""
        ask = self._ask if self._request is None else continued_ask(self._ask, self._request.choices)
        elsewhere = dataclasses.replace(ask, excluded_engine_ids=tuple(sorted(engine_ids)))
        # Where none is known to be ready, a router would only wait for one, and one of these may be the first.
        is_other_known = self._placements.knows_engine_beside(engine_ids)
        timeout_seconds = self._settings.retry_placement_timeout_seconds if is_other_known else _BACKOFF_SECONDS
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._placements.place(elsewhere, deadline=self._deadline)
        except (NoEngineAvailable, TimeoutError):
            # One of them may have come back by now.
            await asyncio.sleep(_BACKOFF_SECONDS)
            return await self._placements.place(ask, deadline=self._deadline)


@dataclass(frozen=True, slots=True)
class _Failure:
    """How a try on an engine failed; ``request`` is None where it could not even be submitted."""

    place: Place
    error: OctavoError
    tried_ns: int
    request: EngineRequest | None

    @property
    def is_after_token(self) -> bool:
        """Whether this engine had brought any."""
        return self.request is not None and self.request.has_new_tokens

    @property
    def is_loss(self) -> bool:
        """Whether the engine had begun: it was lost with the request, and did not only refuse it."""
        was_accepted = self.request is not None and self.request.is_accepted
        return self.is_after_token or (was_accepted and isinstance(self.error, _LOSSES))

    async def give_up(self) -> None:
        """Have the engine end what it still has; one that took the request answers that at once."""
        if self.request is None:
            return
        self.request.note_over()
        self.request.give_up()
        if self.request.is_accepted:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self.request.wait_ended()


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
