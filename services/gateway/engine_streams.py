"""One long-lived Generate stream for each engine, shared by all requests of this gateway.

Owns opening and losing streams, and which request a handle stands for. It must not know text, HTTP or why an
engine was chosen. Every request that was submitted gets exactly one end, also when its stream breaks.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from libs.errors import EngineLost, InternalError, OctavoError, Overloaded, UnavailableError
from libs.obs import get_logger
from services.gateway.choice_progress import ChoiceProgress, Relay, failure_of
from services.gateway.clients import GenerationCall, GenerationClient
from services.gateway.engine_times import EngineStall, TryTimes
from services.gateway.generation import (
    MAX_CHOICES,
    ChoiceStep,
    EngineUsage,
    FinishReason,
    GenerationEnd,
    GenerationFailed,
    GenerationFinished,
    StepEvents,
    Submission,
    TokenLogprob,
)
from services.gateway.latency_receipt import nanos

log = get_logger("engine_streams")

# Steps that were read and not yet dispatched; more wait in the connection, and then in the engine.
_MAX_WAITING_STEPS: Final = 64
# After a dispatch that took longer, the event loop is left to others for this share of its time.
_LONG_DISPATCH_SECONDS: Final = 0.004
_REST_SHARE: Final = 0.25


class EngineRequest:
    """One request on an engine, as its reader sees it.

    Tokens that the reader has not taken are merged, so that a slow reader costs memory for the token ids
    alone, of which there are at most the request's output limit. ``news`` is set when there is something to take;
    the reader clears it, and may share it among the requests that it reads.
    """

    def __init__(
        self,
        request_id: str,
        choices: Sequence[ChoiceProgress],
        news: asyncio.Event,
        on_abort: Callable[[EngineRequest, tuple[int, ...]], None],
        *,
        times: TryTimes | None = None,
        prompt_logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """Begin with all choices of the request, of which those without an end are the engine's.

        ``times`` takes the marks of a request that asked for timings; ``prompt_logprobs`` have come already.
        """
        self.request_id = request_id
        self.times = times
        self.choices = choices
        self._submitted = [choice for choice in choices if choice.end is None]
        # Of the prompt's tokens after the first, where they are wanted; whole as soon as a first token has come.
        self.prompt_logprobs = list(prompt_logprobs)
        self._news = news
        self._on_abort = on_abort
        self._is_abort_sent = False
        self._accepted = asyncio.Event()
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def num_submitted(self) -> int:
        """How many choices were asked of the engine."""
        return len(self._submitted)

    @property
    def num_received_tokens(self) -> int:
        """Tokens that came of the request, from whichever engine, read or not."""
        return sum(choice.num_received_tokens for choice in self.choices)

    @property
    def has_new_tokens(self) -> bool:
        """Whether any came from this engine."""
        return any(choice.has_new_tokens for choice in self._submitted)

    @property
    def is_accepted(self) -> bool:
        """Whether the engine has said that it has the request; it says so of one that it refuses, too."""
        return any(choice.handle is not None for choice in self._submitted)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for more of any choice."""
        return any(choice.is_open for choice in self.choices)

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return any(choice.has_news for choice in self.choices)

    @property
    def has_ended(self) -> bool:
        """Whether the engine has ended all choices."""
        return self._ended.is_set()

    @property
    def usage(self) -> EngineUsage | None:
        """What the choices cost that have ended and of which the engine could tell it; None when there are none."""
        told = [usage for usage in self.usages if usage is not None]
        return functools.reduce(EngineUsage.plus_choice, told) if told else None

    @property
    def usages(self) -> list[EngineUsage | None]:
        """What each choice cost; None for those that have not ended or of which the engine could not tell it."""
        return [choice.usage for choice in self.choices]

    @property
    def told_stalls(self) -> dict[int, tuple[EngineStall, ...]]:
        """The stalls that this engine has told, by choice; none of those of which it could not tell."""
        ends = {choice.index: choice.end for choice in self._submitted}
        return {index: end.usage.stalls for index, end in ends.items() if end is not None and end.usage is not None}

    @property
    def failure(self) -> OctavoError | None:
        """The error of a choice that has failed, if one has."""
        end = failure_of(self._submitted)
        return None if end is None else end.error

    async def wait_accepted(self) -> None:
        """Return when the engine has taken or refused the request."""
        await self._accepted.wait()

    async def wait_begun(self) -> None:
        """Return when a first token or a first end has come."""
        await self._begun.wait()

    async def wait_over(self) -> None:
        """Return when a choice has failed or all have ended."""
        await self._over.wait()

    async def wait_ended(self) -> None:
        """Return when the engine has ended the request, whatever was read of it."""
        await self._ended.wait()

    def take(self) -> list[ChoiceStep]:
        """Take what has come since the last time; the end of a choice is given once, a failure never."""
        if self.times is not None:
            self.times.take()
        return [choice.take() for choice in self.choices if choice.has_news]

    def abort(self) -> None:
        """Ask the engine to end all choices; their ends follow. Those that have ended are left alone."""
        if any(choice.end is None and not choice.is_unwanted for choice in self._submitted):
            self.give_up()
        for choice in self.choices:
            choice.is_unwanted = True

    def abort_choice(self, choice_index: int) -> None:
        """Ask the engine to end one choice; its end follows. Does nothing when that is on the way already."""
        choice = self.choices[choice_index]
        if choice.end is None and not choice.is_unwanted and choice.handle is not None:
            self._on_abort(self, (choice.handle,))
        choice.is_unwanted = True

    def give_up(self) -> None:
        """Ask the engine to end what it still has of the request; another one may go on with it."""
        if not self._is_abort_sent and any(choice.end is None for choice in self._submitted):
            self._is_abort_sent = True
            self._on_abort(self, ())

    def note_over(self) -> None:
        """Keep what this engine told of its stalls; the next one tells its own."""
        if self.times is not None:
            self.times.told_stalls = self.told_stalls

    def choices_for_next_try(self) -> list[ChoiceProgress]:
        """Return the choices for another engine; what this one still says is not seen any more."""
        return [choice.for_next_try() for choice in self.choices]

    def relay_choice(self, choice_index: int, relay: Relay | None) -> None:
        """Let tokens of a choice go to ``relay`` as they come, while the reader only waits; None ends that.

        Where the request's times are kept nothing is relayed: they are those of the reader.
        """
        self.choices[choice_index].relay = relay if self.times is None else None

    def on_accepted(self, handles: Sequence[int]) -> dict[int, ChoiceProgress]:
        """The engine knows the request, and these are its choices; called by its stream."""
        for choice, handle in zip(self._submitted, handles, strict=True):
            choice.handle = handle
        self._accepted.set()
        carried = dict(zip(handles, self._submitted, strict=True))
        # Their reader had enough of them before the engine had them.
        unwanted = tuple(handle for handle, choice in carried.items() if choice.is_unwanted)
        if unwanted and not self._is_abort_sent:
            self._on_abort(self, unwanted)
        return carried

    def on_step(
        self,
        choice_index: int,
        token_ids: list[int],
        end: GenerationEnd | None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """Tokens of a choice or its end came; called by its stream."""
        choice = self.choices[choice_index]
        if choice.end is not None:
            return
        choice.receive(token_ids, logprobs)
        if end is not None:
            self._end(choice, end)
        self._accepted.set()
        self._begun.set()
        self._news.set()

    def on_lost(self, error: OctavoError) -> None:
        """End what is open with an error; called by its stream."""
        for choice in self._submitted:
            self.on_step(choice.index, [], GenerationFailed(error, None))

    def _end(self, choice: ChoiceProgress, end: GenerationEnd) -> None:
        choice.end = _checked(end, is_aborted=choice.is_unwanted)
        if all(choice.end is not None for choice in self._submitted):
            self._ended.set()
            self._over.set()
        elif isinstance(choice.end, GenerationFailed):
            self._over.set()


def _checked(end: GenerationEnd, *, is_aborted: bool) -> GenerationEnd:
    """Let ``aborted`` pass only as the answer to our own abort; else the output would look whole."""
    if isinstance(end, GenerationFinished) and end.reason is FinishReason.ABORTED and not is_aborted:
        return GenerationFailed(EngineLost("The engine gave the request up before it was done."), end.usage)
    return end


class EngineStreams:
    """The streams to all engines, each opened when first needed.

    ``max_requests`` bounds what one stream carries at once.
    """

    def __init__(self, *, max_requests: int, tasks: asyncio.TaskGroup) -> None:
        self._max_requests = max_requests
        self._tasks = tasks
        self._streams: dict[str, _EngineStream] = {}

    def submit(
        self,
        address: str,
        submission: Submission,
        *,
        remaining_seconds: float,
        news: asyncio.Event,
        earlier: EngineRequest | None = None,
    ) -> EngineRequest:
        """Send a request to the engine at ``address`` and return where its tokens will come.

        ``news`` is set whenever some have come; ``earlier`` is what another engine has done of it.

        Raises:
            Overloaded: the stream carries as many requests as it may.
            EngineLost: the engine has not yet ended an earlier try of the same request.
        """
        stream = self._streams.get(address)
        if stream is None:
            stream = _EngineStream(address, self._max_requests)
            self._streams[address] = stream
            self._tasks.create_task(self._run(stream))
        return stream.submit(submission, remaining_seconds, news, earlier)

    def close(self) -> None:
        """Break all streams; what was open on them ends as lost."""
        for stream in list(self._streams.values()):
            stream.close()

    async def _run(self, stream: _EngineStream) -> None:
        try:
            await stream.run()
        finally:
            # A later request opens a new stream; this one has ended all of its own.
            if self._streams.get(stream.address) is stream:
                del self._streams[stream.address]


@dataclass(frozen=True, slots=True)
class _Carried:
    """A choice on a stream and whose it is.

    The choice itself does not know: a request that is over must not keep itself until the garbage collector comes.
    """

    request: EngineRequest
    choice: ChoiceProgress


@dataclass(frozen=True, slots=True)
class _Submit:
    submission: Submission
    remaining_seconds: float


@dataclass(frozen=True, slots=True)
class _Abort:
    """Ends these choices of a request; none means all."""

    request_id: str
    handles: tuple[int, ...]


class _EngineStream:
    """One Generate stream from its opening to its loss."""

    def __init__(self, address: str, max_requests: int) -> None:
        self.address = address
        self._max_requests = max_requests
        self._requests: dict[str, EngineRequest] = {}
        self._by_handle: dict[int, _Carried] = {}
        # The choices whose timings were asked for.
        self._timed: dict[int, tuple[TryTimes, int]] = {}
        # A request is submitted once, and it and each of its choices are aborted at most once; only a peer that
        # takes nothing fills this.
        self._outbox: asyncio.Queue[_Submit | _Abort] = asyncio.Queue((2 + MAX_CHOICES) * max_requests)
        self._closing = asyncio.Event()

    def submit(
        self,
        submission: Submission,
        remaining_seconds: float,
        news: asyncio.Event,
        earlier: EngineRequest | None,
    ) -> EngineRequest:
        if len(self._requests) >= self._max_requests or self._outbox.full():
            raise Overloaded(
                f"The gateway has {len(self._requests)} requests on this engine already; try again shortly.",
                retry_after_seconds=1.0,
            )
        if submission.request_id in self._requests:
            raise EngineLost("The engine still holds an earlier try of the request.")
        request = EngineRequest(
            submission.request_id,
            _choices_of(submission) if earlier is None else earlier.choices_for_next_try(),
            news,
            self._send_abort,
            times=_times_of(submission, earlier),
            # Those that are not whole yet come anew.
            prompt_logprobs=earlier.prompt_logprobs if earlier is not None and earlier.num_received_tokens else (),
        )
        self._requests[submission.request_id] = request
        self._outbox.put_nowait(_Submit(submission, remaining_seconds))
        return request

    def close(self) -> None:
        self._closing.set()

    def _send_abort(self, request: EngineRequest, handles: tuple[int, ...]) -> None:
        try:
            self._outbox.put_nowait(_Abort(request.request_id, handles))
        except asyncio.QueueFull:
            log.warning("engine takes no commands", address=self.address)
            self.close()

    async def run(self) -> None:
        """Carry requests until the stream is lost or closed, and end what is open then."""
        loss: OctavoError = EngineLost("The engine that held the request was lost; send the request again.")
        try:
            async with GenerationClient(self.address) as client, client.open() as call:
                await self._carry(call)
        except OctavoError as error:
            if isinstance(error, UnavailableError) and not isinstance(error, EngineLost):
                # The engine's own word, as when it drains.
                loss = error
            log.warning("engine stream lost", address=self.address, error=error.message)
        except Exception as error:
            loss = InternalError("The gateway could not read the engine's stream.")
            log.exception("engine stream failed", address=self.address, error=str(error))
        finally:
            self._end_all(loss)

    async def _carry(self, call: GenerationCall) -> None:
        """Send and receive until one of both ends; a stream without an error ends by the engine's wish."""
        receiving = asyncio.create_task(self._receive(call))
        sending = asyncio.create_task(self._send(call))
        closing = asyncio.create_task(self._closing.wait())
        tasks: tuple[asyncio.Task[object], ...] = (receiving, sending, closing)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        if closing not in done:
            raise EngineLost("The engine ended its stream.")

    async def _receive(self, call: GenerationCall) -> None:
        """Dispatch steps as they come; raises what ends the stream, when all that came before is dispatched."""
        inbox: asyncio.Queue[StepEvents | None] = asyncio.Queue(_MAX_WAITING_STEPS)
        reading = asyncio.create_task(self._read(call, inbox))
        try:
            while not (reading.done() and inbox.empty()):
                steps = [await inbox.get()]
                while not inbox.empty():
                    steps.append(inbox.get_nowait())
                busy_seconds = self._dispatch_all([step for step in steps if step is not None])
                if busy_seconds > _LONG_DISPATCH_SECONDS:
                    # All others get their turn, and steps that come meanwhile are written together.
                    await asyncio.sleep(busy_seconds * _REST_SHARE)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, call: GenerationCall, inbox: asyncio.Queue[StepEvents | None]) -> None:
        try:
            async for events in call:
                await inbox.put(events)
        finally:
            with suppress(asyncio.QueueFull):
                # Wakes who waits for a step; where the inbox is full nobody waits.
                inbox.put_nowait(None)

    def _dispatch_all(self, steps: Sequence[StepEvents]) -> float:
        """Dispatch steps and have what relays took written, once for each; returns the seconds that it took."""
        begun_at = time.monotonic()
        relays: list[Relay] = []
        for step in steps:
            self._dispatch(step, relays)
        for relay in relays if len(steps) == 1 else dict.fromkeys(relays):
            relay.flush()
        return time.monotonic() - begun_at

    async def _send(self, call: GenerationCall) -> None:
        while True:
            match await self._outbox.get():
                case _Submit(submission, remaining_seconds):
                    await call.submit(submission, remaining_seconds)
                case _Abort(request_id, handles):
                    await call.abort(request_id, handles)

    def _dispatch(self, events: StepEvents, relays: list[Relay]) -> None:
        """Tell all requests what a step did to them; relays that took tokens are added to ``relays``."""
        for request_id, handles in events.started:
            self._start(request_id, handles, events.accept_seconds.get(request_id))
        if self._timed:
            self._note_arrivals(events)
        for handle, entries in events.prompt_logprobs.items():
            if handle in self._by_handle:
                self._by_handle[handle].request.prompt_logprobs += entries
        ends, logprobs = dict(events.ends), events.output_logprobs
        now, offset = time.monotonic(), 0
        for handle, count in zip(events.handles, events.num_tokens, strict=True):
            token_ids = events.token_ids[offset : offset + count]
            offset += count
            carried = self._by_handle.get(handle)
            if carried is None:
                continue
            if handle not in ends and handle not in logprobs:
                relay = carried.choice.relayed(token_ids, now)
                if relay is not None:
                    relays.append(relay)
                    continue
            self._tell(handle, token_ids, ends.pop(handle, None), logprobs.get(handle, ()))
        for handle, end in ends.items():
            self._tell(handle, [], end)

    def _tell(
        self,
        handle: int,
        token_ids: list[int],
        end: GenerationEnd | None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        carried = self._by_handle.get(handle)
        if carried is None:
            return
        request = carried.request
        request.on_step(carried.choice.index, token_ids, end, logprobs)
        if end is not None:
            del self._by_handle[handle]
            self._timed.pop(handle, None)
            if request.has_ended:
                self._requests.pop(request.request_id, None)

    def _note_arrivals(self, events: StepEvents) -> None:
        now_ns = time.monotonic_ns()
        failed = {handle for handle, end in events.ends if isinstance(end, GenerationFailed)}
        arrived = {*events.handles, *(handle for handle, _ in events.ends)}
        for handle, (times, choice_index) in self._timed.items():
            if handle in events.first_tokens:
                times.first_tokens[choice_index] = events.first_tokens[handle]
            if handle in failed:
                times.fail(choice_index, events.step_id, now_ns)
            elif handle in arrived:
                times.arrive(choice_index, events.step_id, now_ns)

    def _start(self, request_id: str, handles: list[int], accept_seconds: float | None) -> None:
        request = self._requests.get(request_id)
        if request is None:
            log.warning("engine started an unknown request", address=self.address, request_id=request_id)
            return
        if len(handles) != request.num_submitted:
            request.on_lost(InternalError("The engine started a wrong number of choices."))
            self._requests.pop(request_id)
            return
        if request.times is not None:
            request.times.accept(time.monotonic_ns(), accept_seconds)
        choices = request.on_accepted(handles)
        if request.times is not None:
            self._timed |= {handle: (request.times, choice.index) for handle, choice in choices.items()}
        self._by_handle |= {handle: _Carried(request, choice) for handle, choice in choices.items()}

    def _end_all(self, loss: OctavoError) -> None:
        requests, self._requests = self._requests, {}
        self._by_handle.clear()
        for request in requests.values():
            request.on_lost(loss)


def _choices_of(submission: Submission) -> list[ChoiceProgress]:
    return [ChoiceProgress(choice.index) for choice in submission.choices]


def _times_of(submission: Submission, earlier: EngineRequest | None) -> TryTimes | None:
    if submission.stall_bound_seconds is None:
        return None
    times = TryTimes(time.monotonic_ns(), nanos(submission.stall_bound_seconds))
    if earlier is not None and earlier.times is not None:
        times.go_on_from(earlier.times)
    return times
