"""The two ways to answer a chat completion: a stream of events, and one body at the end.

Owns how engine steps become text for a client, keep-alives, and which end a client sees. Both ways read the same
steps, so that the concatenated stream equals the whole answer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from services.gateway.accounting import RequestAccount
from services.gateway.failover import Generation
from services.gateway.generation import FinishReason, GenerationFailed, GenerationFinished, GenerationStep
from services.gateway.openai_answers import AnswerHead, ChatChunks, UsageCounts, completion_body
from services.gateway.output_text import OutputText, TextDelta
from services.gateway.sse import SseWriter


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are timed."""

    heartbeat_seconds: float
    abort_settle_seconds: float


class AnswerSource:
    """One request's text as it comes from its generation, counted on the way."""

    def __init__(
        self, generation: Generation, output: OutputText, account: RequestAccount, settings: AnswerSettings
    ) -> None:
        self._generation = generation
        self._output = output
        self._account = account
        self._settings = settings
        self._step: GenerationStep | None = None

    @property
    def heartbeat_seconds(self) -> float:
        """How long a client may be left without a sign of life."""
        return self._settings.heartbeat_seconds

    @property
    def has_ended(self) -> bool:
        """Whether the engine has ended the generation, so that its counts are known."""
        return self._generation.has_ended

    async def start(self) -> None:
        """Wait for the first step; raises OctavoError when there is none."""
        self._step = await self._generation.start()

    async def next_delta(self) -> TextDelta | None:
        """Return the next text; None when nothing came for the time of a heartbeat.

        Raises:
            OctavoError: the engine failed; what came before the failure was returned already.
        """
        step, self._step = self._step, None
        if step is None:
            step = await self._generation.next_step(self._settings.heartbeat_seconds)
        if step is None:
            return None
        if isinstance(step.end, GenerationFailed):
            if not step.token_ids:
                raise step.end.error
            # First the tokens, then the error.
            self._step = GenerationStep([], step.end)
            return self._take(step, None)
        return self._take(step, step.end)

    async def usage(self) -> UsageCounts:
        """Return the counts of an answer that is over, with those that only the engine knows if it tells."""
        await self._generation.settle(self._settings.abort_settle_seconds)
        usage = self._generation.usage
        return UsageCounts(
            num_prompt_tokens=self._account.num_prompt_tokens,
            num_completion_tokens=self._account.num_completion_tokens,
            num_cached_tokens=None if usage is None else usage.num_cached_tokens,
        )

    def _take(self, step: GenerationStep, end: GenerationFinished | None) -> TextDelta:
        if step.token_ids or not self._account.has_delivered:
            self._account.deliver()
        delta = self._output.take(step.token_ids, end)
        self._account.num_completion_tokens = self._output.num_tokens
        if delta.finish_reason is not None:
            # After a stop string the engine would go on; nobody wants what it would say.
            self._generation.stop()
        return delta


async def send_whole(source: AnswerSource, head: AnswerHead, account: RequestAccount) -> web.Response:
    """Collect the answer and return it as one body."""
    await source.start()
    pieces: list[str] = []
    reason: FinishReason | None = None
    while reason is None:
        delta = await source.next_delta()
        if delta is not None:
            pieces.append(delta.text)
            reason = delta.finish_reason
    usage = await source.usage()
    account.finish(reason)
    body = completion_body(head, text="".join(pieces), reason=reason, usage=usage)
    return web.Response(body=body, content_type="application/json")


async def send_stream(
    source: AnswerSource, writer: SseWriter, chunks: ChatChunks, account: RequestAccount
) -> web.StreamResponse:
    """Write the answer as it comes; an error is raised, whether or not the stream has begun."""
    await _start(source, writer)
    ending = await _write_deltas(source, writer, chunks)
    data = ending.data + chunks.finish(ending.reason)
    if chunks.includes_usage:
        if not source.has_ended:
            # The engine is asked for its counts after a stop string; the client need not wait for the text.
            await writer.send(data)
            data = b""
        data += chunks.usage(await source.usage())
    response = await writer.finish(data)
    account.finish(ending.reason)
    return response


async def _start(source: AnswerSource, writer: SseWriter) -> None:
    """Wait for the first step and keep the client waiting too, by comments."""
    starting = asyncio.create_task(source.start())
    try:
        while not starting.done():
            await asyncio.wait({starting}, timeout=source.heartbeat_seconds)
            if not starting.done():
                await writer.ping()
        starting.result()
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Ending:
    """What is left to write when the text is over."""

    data: bytes
    reason: FinishReason


async def _write_deltas(source: AnswerSource, writer: SseWriter, chunks: ChatChunks) -> _Ending:
    """Write the text until its end; the role goes out with the first of it and the last is left to the caller."""
    prefix = chunks.role()
    while True:
        delta = await source.next_delta()
        if delta is None:
            await writer.ping()
            continue
        data = prefix + chunks.content(delta.text)
        if delta.finish_reason is not None:
            return _Ending(data, delta.finish_reason)
        prefix = b""
        if data:
            await writer.send(data)
