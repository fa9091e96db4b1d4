"""An engine that speaks the real protocol and does what a script says, to test those who talk to engines.

Implements GenerationService and EngineService.GetEngine. It has no scheduler and no model: tokens, delays and
faults are given.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from libs.errors import OctavoError
from libs.kv import HASH_ALGORITHM, HashContract
from libs.protogen.engine.v1 import engine_pb2, engine_pb2_grpc
from libs.protogen.generation.v1 import generation_pb2, generation_pb2_grpc
from libs.rpc import Registration, duration_from_seconds, make_server, status_from_error
from tests.patience import PATIENCE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the engine does with one request."""

    token_ids: Sequence[int] = ()
    tokens_per_step: int = 1
    # Sizes of the first steps, where they differ.
    step_sizes: Sequence[int] = ()
    # Before the first step and between steps.
    first_delay_seconds: float = 0.0
    step_delay_seconds: float = 0.0
    # The first and the last step wait for these events.
    first_step_after: asyncio.Event | None = None
    last_step_after: asyncio.Event | None = None
    # The end when all tokens were sent; the request's own limit ends it before, by length.
    reason: int = generation_pb2.FINISH_REASON_STOP
    # The last token is then the one that ended the output.
    ends_with_stop_token: bool = False
    num_cached_tokens: int = 0
    # After all tokens: fail with this error, or say nothing more, or break the whole stream.
    error: OctavoError | None = None
    hangs: bool = False
    breaks_stream: bool = False
    # The tokens are the whole output: what a submit brings along is checked and left out.
    goes_on: bool = False
    # Not even Started is sent.
    is_deaf: bool = False
    # What the choices after the first do; those that are not given do the same as the first.
    other_choices: Sequence[Script] = ()

    def steps(self, token_ids: Sequence[int]) -> list[Sequence[int]]:
        """Cut tokens into steps; there is one at least."""
        steps: list[Sequence[int]] = []
        sizes = iter(self.step_sizes)
        while token_ids:
            size = next(sizes, self.tokens_per_step)
            steps.append(token_ids[:size])
            token_ids = token_ids[size:]
        return steps or [[]]

    def of_choice(self, index: int) -> Script:
        """What one choice does."""
        return self.other_choices[index - 1] if 0 < index <= len(self.other_choices) else self


@dataclass(slots=True)
class _Running:
    """One choice of a request."""

    handle: int
    submit: generation_pb2.Submit
    script: Script
    # Its place in the submit.
    place: int = 0
    task: asyncio.Task[None] | None = None
    num_sent: int = 0

    @property
    def prior_token_ids(self) -> list[int]:
        """The output that it had before."""
        choices = self.submit.choices
        return list(choices[self.place].output_token_ids) if self.place < len(choices) else []

    def token_ids(self) -> list[int]:
        """What it sends if nothing goes wrong, without regard to the limit."""
        prior, token_ids = self.prior_token_ids, list(self.script.token_ids)
        if not self.script.goes_on:
            return token_ids
        assert token_ids[: len(prior)] == prior, f"{prior} is not how {token_ids} begins"
        return token_ids[len(prior) :]

    start_time: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class FakeGenerationEngine:
    """One engine at one address."""

    tokenizer_digest: bytes
    engine_id: str = "fake-0"
    model_name: str = "smollm2-135m-instruct"
    max_model_len: int = 8192
    block_size: int = 16
    state: engine_pb2.EngineState.ValueType = engine_pb2.ENGINE_STATE_READY
    default_script: Script = field(default_factory=Script)
    scripts: deque[Script] = field(default_factory=deque)
    # Those of some requests, by their ids, whatever the others say.
    scripts_by_request: dict[str, Script] = field(default_factory=dict)
    submits: list[generation_pb2.Submit] = field(default_factory=list)
    aborted_ids: list[str] = field(default_factory=list)
    # Requests of which single choices were aborted, and how many each time.
    partly_aborted: list[tuple[str, int]] = field(default_factory=list)
    num_streams: int = 0
    # A broken engine starts so many, whatever is asked for.
    num_choices_started: int | None = None
    address: str = ""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _running: dict[str, list[_Running]] = field(default_factory=dict)
    _server: Any = None
    _next_handle: int = 1

    async def start(self, address: str = "127.0.0.1:0") -> None:
        """Listen."""
        self._server = make_server(
            address,
            [
                Registration(
                    generation_pb2_grpc.add_GenerationServiceServicer_to_server,
                    _Generation(self),
                    "octavo.generation.v1.GenerationService",
                ),
                Registration(
                    engine_pb2_grpc.add_EngineServiceServicer_to_server,
                    _Engine(self),
                    "octavo.engine.v1.EngineService",
                ),
            ],
        )
        await self._server.start()
        self.address = self._server.address

    async def stop(self) -> None:
        """Go away at once, as by kill -9: streams break."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    @property
    def running_ids(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._running)

    @property
    def hash_contract(self) -> HashContract:
        """How its prefix hashes are made."""
        return HashContract(self.block_size, HASH_ALGORITHM, self.tokenizer_digest)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that the engine saw makes ``condition`` true; fails after a generous time."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def note(self) -> None:
        """Wake who waits for a condition."""
        self._changed.set()

    def engine(self) -> engine_pb2.Engine:
        """Its identity on the wire."""
        contract = engine_pb2.HashContract(
            block_size=self.block_size, algorithm=HASH_ALGORITHM, tokenizer_digest=self.tokenizer_digest
        )
        return engine_pb2.Engine(
            engine_id=self.engine_id,
            incarnation=1,
            address=self.address,
            model_name=self.model_name,
            hash_contract=contract,
            state=self.state,
            num_blocks=100,
            max_model_len=self.max_model_len,
            max_num_seqs=16,
            max_num_batched_tokens=512,
        )

    def load(self) -> engine_pb2.EngineLoad:
        """Its load on the wire."""
        return engine_pb2.EngineLoad(
            num_running_requests=len(self._running),
            num_available_blocks=100 - len(self._running),
            num_blocks=100,
            state=self.state,
        )


def logprob_of(token_id: int) -> float:
    """What the engine says of any token, exact in 32 bits."""
    return -(token_id % 16 + 1) / 16


def alternatives_of(token_id: int, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens where ``token_id`` stands."""
    return [(token_id + 1 + index, -(index + 1) / 64) for index in range(count)]


def measured(token_ids: Sequence[int], count: int) -> generation_pb2.TokenLogprobs:
    """Log-probabilities of tokens, each with so many alternatives, on the wire."""
    alternatives = [alternative for token_id in token_ids for alternative in alternatives_of(token_id, count)]
    return generation_pb2.TokenLogprobs(
        logprobs=[logprob_of(token_id) for token_id in token_ids],
        ranks=[token_id % 9 + 1 for token_id in token_ids],
        num_alternatives=[count] * len(token_ids),
        alternative_token_ids=[token_id for token_id, _ in alternatives],
        alternative_logprobs=[logprob for _, logprob in alternatives],
    )


class _Engine(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, engine: FakeGenerationEngine) -> None:
        self._engine = engine

    async def GetEngine(self, request: engine_pb2.GetEngineRequest, context: Any) -> engine_pb2.GetEngineResponse:
        return engine_pb2.GetEngineResponse(engine=self._engine.engine(), load=self._engine.load())

    async def DrainEngine(
        self, request: engine_pb2.DrainEngineRequest, context: Any
    ) -> engine_pb2.DrainEngineResponse:
        self._engine.state = engine_pb2.ENGINE_STATE_DRAINING
        return engine_pb2.DrainEngineResponse(num_requests=len(self._engine.running_ids))

    async def WatchEngine(
        self, request: engine_pb2.WatchEngineRequest, context: Any
    ) -> AsyncIterator[engine_pb2.WatchEngineResponse]:
        snapshot = engine_pb2.EngineSnapshot(
            engine=self._engine.engine(), load=self._engine.load(), is_first_part=True, is_last_part=True
        )
        yield engine_pb2.WatchEngineResponse(incarnation=1, snapshot=snapshot)
        await asyncio.Event().wait()

    async def GetPageTable(
        self, request: engine_pb2.GetPageTableRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GetPageTableResponse]:
        yield engine_pb2.GetPageTableResponse()


class _Generation(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, engine: FakeGenerationEngine) -> None:
        self._engine = engine

    async def Generate(
        self, request_iterator: AsyncIterator[generation_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        stream = _Stream(self._engine)
        self._engine.num_streams += 1
        reading = asyncio.create_task(stream.read(request_iterator))
        try:
            while (message := await stream.outbox.get()) is not None:
                yield message
        finally:
            reading.cancel()
            stream.close()


class _Stream:
    """One gateway's stream."""

    def __init__(self, engine: FakeGenerationEngine) -> None:
        self._engine = engine
        self._step_id = 0
        self._requests: dict[str, list[_Running]] = {}
        # None ends the stream.
        self.outbox: asyncio.Queue[generation_pb2.GenerateResponse | None] = asyncio.Queue()

    async def read(self, commands: AsyncIterator[generation_pb2.GenerateRequest]) -> None:
        async for command in commands:
            if command.HasField("submit"):
                self._submit(command.submit)
            else:
                self._abort(command.abort.request_id, command.abort.handles)
            self._engine.note()

    def close(self) -> None:
        for request_id, choices in self._requests.items():
            for running in choices:
                if running.task is not None:
                    running.task.cancel()
            self._engine._running.pop(request_id, None)
        self._engine.note()

    def _submit(self, submit: generation_pb2.Submit) -> None:
        engine = self._engine
        engine.submits.append(submit)
        script = engine.scripts_by_request.get(submit.request_id)
        if script is None:
            script = engine.scripts.popleft() if engine.scripts else engine.default_script
        first = engine._next_handle
        engine._next_handle += len(submit.choices)
        num_choices = engine.num_choices_started or len(submit.choices)
        indices = [choice.choice_index for choice in submit.choices] or [0]
        choices = [
            _Running(first + place, submit, script.of_choice(indices[min(place, len(indices) - 1)]), place)
            for place in range(num_choices)
        ]
        engine._running[submit.request_id] = list(choices)
        self._requests[submit.request_id] = list(choices)
        if script.is_deaf:
            return
        handles = [running.handle for running in choices]
        started = generation_pb2.Started(request_id=submit.request_id, handles=handles)
        if submit.HasField("stall_bound"):
            started.accept_duration.CopyFrom(duration_from_seconds(0.0))
        self._send(generation_pb2.GenerateResponse(started=[started]))
        if submit.sampling_params.HasField("num_prompt_logprobs"):
            self._measure_prompt(choices[0])
        for running in choices:
            running.task = asyncio.create_task(self._play(running))

    def _abort(self, request_id: str, handles: Sequence[int]) -> None:
        if handles:
            self._engine.partly_aborted.append((request_id, len(handles)))
        else:
            self._engine.aborted_ids.append(request_id)
        for running in list(self._requests.get(request_id, ())):
            if handles and running.handle not in handles:
                continue
            if running.task is not None:
                running.task.cancel()
            self._finish(running, generation_pb2.FINISH_REASON_ABORTED)

    def _measure_prompt(self, running: _Running) -> None:
        """Tell the prompt's log-probabilities in two parts, as chunks of a prompt are computed."""
        token_ids, count = running.submit.prompt_token_ids[1:], running.submit.sampling_params.num_prompt_logprobs
        middle = len(token_ids) // 2
        for part in (token_ids[:middle], token_ids[middle:]):
            if part:
                message = generation_pb2.GenerateResponse()
                message.prompt_logprobs.handles.append(running.handle)
                message.prompt_logprobs.num_tokens.append(len(part))
                message.prompt_logprobs.tokens.CopyFrom(measured(part, count))
                self._send(message)

    async def _play(self, running: _Running) -> None:
        script = running.script
        await asyncio.sleep(script.first_delay_seconds)
        if script.first_step_after is not None:
            await script.first_step_after.wait()
        limit = running.submit.sampling_params.max_output_tokens - len(running.prior_token_ids)
        whole = running.token_ids()
        token_ids = whole[:limit]
        is_cut = len(token_ids) < len(whole)
        fails = script.error is not None or script.hangs or script.breaks_stream
        chunks = script.steps(token_ids)
        for index, chunk in enumerate(chunks):
            if index:
                await asyncio.sleep(script.step_delay_seconds)
            if index == len(chunks) - 1 and script.last_step_after is not None:
                await script.last_step_after.wait()
            running.num_sent += len(chunk)
            if index < len(chunks) - 1 or (fails and not is_cut):
                self._send(self._tokens(running, chunk))
            else:
                reason = generation_pb2.FINISH_REASON_LENGTH if is_cut else script.reason
                self._finish(running, reason, chunk)
                return
        await self._fail(running)

    async def _fail(self, running: _Running) -> None:
        script = running.script
        if script.hangs:
            await asyncio.Event().wait()
        if script.breaks_stream:
            self.outbox.put_nowait(None)
            return
        assert script.error is not None
        self._end(running)
        failed = generation_pb2.Failed(
            handle=running.handle, status=status_from_error(script.error), usage=self._usage(running)
        )
        self._send(generation_pb2.GenerateResponse(failed=[failed]))

    def _finish(self, running: _Running, reason: Any, token_ids: Sequence[int] = ()) -> None:
        self._end(running)
        finished = generation_pb2.Finished(handle=running.handle, reason=reason, usage=self._usage(running))
        if running.script.ends_with_stop_token and reason == generation_pb2.FINISH_REASON_STOP:
            finished.stop_token_id = token_ids[-1]
        message = self._tokens(running, token_ids)
        message.finished.append(finished)
        self._send(message)

    def _end(self, running: _Running) -> None:
        request_id = running.submit.request_id
        for requests in (self._requests, self._engine._running):
            choices = requests.get(request_id, [])
            if running in choices:
                choices.remove(running)
            if not choices:
                requests.pop(request_id, None)
        self._engine.note()

    def _tokens(self, running: _Running, token_ids: Sequence[int]) -> generation_pb2.GenerateResponse:
        if not token_ids:
            return generation_pb2.GenerateResponse()
        message = generation_pb2.GenerateResponse(
            handles=[running.handle], num_tokens=[len(token_ids)], token_ids=token_ids
        )
        if running.submit.HasField("stall_bound") and running.num_sent == len(token_ids):
            message.first_tokens.append(self._first_token(running))
        params = running.submit.sampling_params
        if params.HasField("num_logprobs"):
            message.output_logprobs.handles.append(running.handle)
            message.output_logprobs.tokens.CopyFrom(measured(token_ids, params.num_logprobs))
        return message

    def _first_token(self, running: _Running) -> generation_pb2.FirstToken:
        num_prompt_tokens, num_cached_tokens = (
            len(running.submit.prompt_token_ids),
            running.script.num_cached_tokens,
        )
        reason = generation_pb2.CACHE_MISS_REASON_NOT_SEEN
        return generation_pb2.FirstToken(
            handle=running.handle,
            queue_duration=duration_from_seconds(0.0),
            prefill_duration=duration_from_seconds(time.monotonic() - running.start_time),
            since_started_duration=duration_from_seconds(time.monotonic() - running.start_time),
            num_cached_tokens=num_cached_tokens,
            misses=[generation_pb2.CacheMiss(reason=reason, num_tokens=num_prompt_tokens - num_cached_tokens)],
        )

    def _usage(self, running: _Running) -> generation_pb2.Usage:
        return generation_pb2.Usage(
            num_cached_tokens=running.script.num_cached_tokens,
            num_computed_tokens=len(running.submit.prompt_token_ids) + running.num_sent,
            num_output_tokens=running.num_sent,
        )

    def _send(self, message: generation_pb2.GenerateResponse) -> None:
        self._step_id += 1
        message.step_id = self._step_id
        self.outbox.put_nowait(message)
