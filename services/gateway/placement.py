"""Where a request goes: the router's word, or the gateway's own pick when no router answers.

Owns the one stream of placements to the router, its reconnection, and the count of requests placed on each engine.
It must not know tokens or what an engine does with a request.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from libs.errors import Draining, ModelNotFound, NoEngineAvailable, OctavoError
from libs.obs import get_logger
from libs.obs.metrics import GatewayMetrics
from services.gateway.clients import PlacementCall, RouterClient
from services.gateway.engine_directory import EngineDirectory
from services.gateway.peers import EngineChoice, EngineState, PlacementAsk

log = get_logger("placement")

_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 2.0
_RETRY_AFTER_SECONDS = 2.0


class RouterSilent(Exception):
    """No router answers; the gateway must choose by itself. Never reaches a client."""


class Place:
    """An engine chosen for one request. It is held until it is released."""

    def __init__(
        self, choice: EngineChoice, on_started: Callable[[], None], on_released: Callable[[], None]
    ) -> None:
        self.choice = choice
        self._on_started = on_started
        self._on_released = on_released
        self._is_released = False

    def mark_started(self) -> None:
        """Say that the first token came."""
        self._on_started()

    def release(self) -> None:
        """Give the place back; a second time does nothing."""
        if not self._is_released:
            self._is_released = True
            self._on_released()


class Placements:
    """Finds places: by the router if there is one that answers, else by the gateway's own view."""

    def __init__(
        self,
        *,
        router: RouterPlacements | None,
        directory: EngineDirectory,
        metrics: GatewayMetrics,
        random_source: random.Random,
    ) -> None:
        self._router = router
        self._directory = directory
        self._metrics = metrics
        self._random = random_source
        self._num_placed: Counter[str] = Counter()

    async def place(self, ask: PlacementAsk, *, deadline: float) -> Place:
        """Return an engine for a request; the caller bounds the wait and releases the place.

        ``deadline`` is on the event loop's clock.

        Raises:
            OctavoError: there is no place, for example NoEngineAvailable or Overloaded.
        """
        if self._router is not None:
            try:
                return self._counted(await self._router.place(ask, deadline=deadline))
            except RouterSilent:
                self._metrics.own_placements.inc()
        return self._counted(Place(self._pick(ask), on_started=_nothing, on_released=_nothing))

    def knows_engine_beside(self, engine_ids: Collection[str]) -> bool:
        """Tell whether an engine was ready at the last look that is none of these."""
        return any(
            engine.state is EngineState.READY and engine.engine_id not in engine_ids
            for engine in self._directory.engines
        )

    def _counted(self, place: Place) -> Place:
        # Counted before anything is sent, so that a burst does not see the same idle engine.
        address = place.choice.address
        self._num_placed[address] += 1

        def release() -> None:
            self._num_placed[address] -= 1
            if not self._num_placed[address]:
                del self._num_placed[address]
            place.release()

        return Place(place.choice, on_started=place.mark_started, on_released=release)

    def _pick(self, ask: PlacementAsk) -> EngineChoice:
        """Choose the engine with the fewest requests of this gateway; ties fall at random."""
        num_tokens = ask.num_prompt_tokens + ask.max_output_tokens
        candidates = [
            engine
            for engine in self._directory.engines
            if engine.state is EngineState.READY
            and engine.hash_contract == ask.hash_contract
            and engine.max_model_len >= num_tokens
            and engine.engine_id not in ask.excluded_engine_ids
        ]
        if not candidates:
            raise _no_engine()
        fewest = min(self._num_placed[engine.address] for engine in candidates)
        engine = self._random.choice(
            [engine for engine in candidates if self._num_placed[engine.address] == fewest]
        )
        return EngineChoice(engine.engine_id, engine.address)


class _Notice(StrEnum):
    """What a gateway tells the router about a request that it asked about."""

    STARTED = "started"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class RouterPlacements:
    """The stream of placements to the router, opened again whenever it is lost.

    A stream on which requests wait without any word from the router is checked for life, because a router that
    holds requests in its fair queue and one that has frozen look alike otherwise.
    """

    def __init__(self, address: str, *, timeout_seconds: float, max_requests: int) -> None:
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._max_requests = max_requests
        self._session: _Session | None = None
        self._connected = asyncio.Event()
        self._silent_since: float | None = None

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        loop = asyncio.get_running_loop()
        backoff_seconds = _MIN_BACKOFF_SECONDS
        self._silent_since = loop.time()
        while True:
            start_time = loop.time()
            try:
                async with RouterClient(self._address) as client:
                    await client.check_alive(self._timeout_seconds)
                    await self._serve(client)
            except OctavoError as error:
                if backoff_seconds == _MIN_BACKOFF_SECONDS:
                    log.warning("router does not answer", address=self._address, error=error.message)
            if loop.time() - start_time > _MAX_BACKOFF_SECONDS:
                backoff_seconds = _MIN_BACKOFF_SECONDS
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, _MAX_BACKOFF_SECONDS)

    async def place(self, ask: PlacementAsk, *, deadline: float) -> Place:
        """Ask the router for a place and wait for its answer.

        Raises:
            RouterSilent: no router answers.
            OctavoError: the router's refusal.
        """
        session = await self._current_session()
        loop = asyncio.get_running_loop()
        answer = session.ask(ask, remaining_seconds=deadline - loop.time())
        try:
            choice = await answer
        except asyncio.CancelledError:
            session.withdraw(ask.request_id)
            raise
        request_id = ask.request_id
        return Place(
            choice,
            on_started=lambda: session.tell(_Notice.STARTED, request_id),
            on_released=lambda: session.tell(_Notice.FINISHED, request_id),
        )

    async def _current_session(self) -> _Session:
        if self._session is None:
            # The wait is counted from the loss, so that requests do not each wait anew while the router is away.
            silent_since = self._silent_since
            loop = asyncio.get_running_loop()
            until = (loop.time() if silent_since is None else silent_since) + self._timeout_seconds
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._connected.wait()
        if self._session is None:
            raise RouterSilent
        return self._session

    async def _serve(self, client: RouterClient) -> None:
        async with client.open_placements() as call:
            session = _Session(client, call, self._timeout_seconds, self._max_requests)
            self._session, self._silent_since = session, None
            self._connected.set()
            try:
                await session.run()
            finally:
                self._session, self._silent_since = None, asyncio.get_running_loop().time()
                self._connected.clear()
                session.end()


@dataclass(frozen=True, slots=True)
class _Enqueue:
    ask: PlacementAsk
    remaining_seconds: float


class _Session:
    """One stream of placements from its opening to its loss."""

    def __init__(
        self, client: RouterClient, call: PlacementCall, timeout_seconds: float, max_requests: int
    ) -> None:
        self._client = client
        self._call = call
        self._timeout_seconds = timeout_seconds
        self._waiting: dict[str, asyncio.Future[EngineChoice]] = {}
        # Each request sends at most an ask, a start and an end; only a router that takes nothing fills this.
        self._outbox: asyncio.Queue[_Enqueue | tuple[_Notice, str]] = asyncio.Queue(3 * max_requests)
        self._heard_time = asyncio.get_running_loop().time()
        self._is_over = asyncio.Event()

    def ask(self, ask: PlacementAsk, *, remaining_seconds: float) -> asyncio.Future[EngineChoice]:
        answer: asyncio.Future[EngineChoice] = asyncio.get_running_loop().create_future()
        if self._is_over.is_set() or self._outbox.full():
            answer.set_exception(RouterSilent())
            return answer
        if not self._waiting:
            # Silence counts only while somebody waits.
            self._heard_time = asyncio.get_running_loop().time()
        self._waiting[ask.request_id] = answer
        self._outbox.put_nowait(_Enqueue(ask, remaining_seconds))
        return answer

    def withdraw(self, request_id: str) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self.tell(_Notice.CANCELLED, request_id)
        else:
            # The place came while the request was being withdrawn.
            self.tell(_Notice.FINISHED, request_id)

    def tell(self, notice: _Notice, request_id: str) -> None:
        """Send a notice, unless the stream is over: the router has forgotten its requests then."""
        if self._is_over.is_set():
            return
        try:
            self._outbox.put_nowait((notice, request_id))
        except asyncio.QueueFull:
            self._is_over.set()

    async def run(self) -> None:
        """Carry asks and answers until the stream is lost; raises OctavoError when it breaks."""
        tasks = [
            asyncio.create_task(work)
            for work in (self._receive(), self._send(), self._check_life(), self._is_over.wait())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def end(self) -> None:
        """Tell all who wait that the router is gone."""
        self._is_over.set()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(RouterSilent())

    async def _receive(self) -> None:
        async for request_id, outcome in self._call:
            self._heard_time = asyncio.get_running_loop().time()
            answer = self._waiting.pop(request_id, None)
            if answer is None or answer.done():
                # It was withdrawn while the place was on its way.
                self.tell(_Notice.FINISHED, request_id)
            elif isinstance(outcome, OctavoError):
                answer.set_exception(_as_told(outcome))
            else:
                answer.set_result(outcome)

    async def _send(self) -> None:
        while True:
            message = await self._outbox.get()
            match message:
                case _Enqueue(ask, remaining_seconds):
                    await self._call.enqueue(ask, remaining_seconds)
                case (_Notice.STARTED, request_id):
                    await self._call.started(request_id)
                case (_Notice.FINISHED, request_id):
                    await self._call.finished(request_id)
                case (_Notice.CANCELLED, request_id):
                    await self._call.cancelled(request_id)

    async def _check_life(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._timeout_seconds)
            if self._waiting and loop.time() - self._heard_time >= self._timeout_seconds:
                await self._client.check_alive(self._timeout_seconds)
                self._heard_time = loop.time()


def _as_told(refusal: OctavoError) -> Exception:
    """Return what a router's refusal means for the request."""
    match refusal:
        case Draining():
            # It speaks of the router alone: engines may have room for the request all the same.
            return RouterSilent()
        case ModelNotFound():
            # This gateway serves the model, so its client is not wrong: the engines are not there.
            return _no_engine()
        case _:
            return refusal


def _no_engine() -> NoEngineAvailable:
    return NoEngineAvailable(
        "No engine is ready to take the request; try again shortly.", retry_after_seconds=_RETRY_AFTER_SECONDS
    )


def _nothing() -> None:
    """Stand in for notices to a router that did not choose the place."""
