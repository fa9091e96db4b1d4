"""The two ways to answer: a stream of events, and one body at the end.

Owns how engine steps become text for a client, keep-alives, and which end a client sees. Both ways read the same
deltas, so that the concatenated stream equals the whole answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from services.gateway.accounting import RequestAccount
from services.gateway.answer_format import AnswerFormat, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.choice_progress import Relay
from services.gateway.client_call import Answered, AnswerWriter
from services.gateway.failover import Generation, deadline_exceeded
from services.gateway.generation import ChoiceStep, FinishReason, TokenLogprob
from services.gateway.latency_receipt import Segment
from services.gateway.output_text import ChoiceOutput, OutputText
from services.gateway.request_times import NO_ANSWER_TIMES, AnswerTimes
from services.gateway.token_relay import JsonPieces, TokenRelay, WholeRelay

# So many tokens' log-probabilities take about a millisecond to write.
_MANY_LOGPROBS: Final = 128

# Makes what writes the tokens of one choice, by its index in the answer; None where its chunks say more than text.
NewRelay: TypeAlias = Callable[[int, OutputText, RequestAccount], Relay | None]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How answers are timed."""

    heartbeat_seconds: float
    abort_settle_seconds: float


class PromptAnswer:
    """The choices of one prompt as they come from its generation, counted on the way."""

    def __init__(
        self, generation: Generation, outputs: Sequence[ChoiceOutput], account: RequestAccount, *, prompt_index: int
    ) -> None:
        self.generation = generation
        self._outputs = outputs
        self._account = account
        self._first_index = prompt_index * len(outputs)
        self._begun: set[int] = set()
        self._reasons: dict[int, FinishReason] = {}
        self.failure: Exception | None = None

    @property
    def num_choices(self) -> int:
        """How many choices the prompt has."""
        return len(self._outputs)

    @property
    def is_over(self) -> bool:
        """Whether all choices have ended for the client."""
        return len(self._reasons) == len(self._outputs)

    def take(self) -> list[ChoiceDelta]:
        """Take what has come."""
        steps = self.generation.take()
        is_begun = not self._account.has_delivered
        if any(step.token_ids for step in steps) or (steps and is_begun):
            self._account.deliver()
        deltas = [self._delta(step) for step in steps if step.choice_index not in self._reasons]
        self._account.num_completion_tokens = sum(output.num_tokens for output in self._outputs)
        if self.is_over:
            # After a stop string the engine would go on; nobody wants what it would say.
            self.generation.stop()
        return deltas

    @property
    def silent_seconds(self) -> float:
        """Time since tokens were last on their way to the client."""
        return self._account.silent_seconds

    def begin_relay(self, new_relay: NewRelay) -> None:
        """Let tokens of choices of which only the text is wanted pass by, until ``end_relay``."""
        for index, output in enumerate(self._outputs):
            is_running = index in self._begun and index not in self._reasons
            if is_running and isinstance(output, OutputText) and output.is_plain:
                relay = new_relay(self._first_index + index, output, self._account)
                self.generation.relay_choice(index, relay)

    def end_relay(self) -> None:
        """Let all tokens come to ``take``."""
        for index in range(len(self._outputs)):
            self.generation.relay_choice(index, None)

    def finish(self) -> None:
        """Close the books of an answer that is over: it is cut by its length if any choice is."""
        is_cut = FinishReason.LENGTH in self._reasons.values()
        self._account.finish(FinishReason.LENGTH if is_cut else FinishReason.STOP)

    def usage(self) -> UsageCounts:
        """Return the counts, with those that only the engine knows if it has told them."""
        usage = self.generation.usage
        return UsageCounts(
            num_prompt_tokens=self._account.num_prompt_tokens,
            num_completion_tokens=self._account.num_completion_tokens,
            num_cached_tokens=None if usage is None else usage.num_cached_tokens,
            num_reasoning_tokens=_sum_of_known([output.num_reasoning_tokens for output in self._outputs]),
        )

    def _delta(self, step: ChoiceStep) -> ChoiceDelta:
        index = step.choice_index
        content = self._outputs[index].take(step.token_ids, step.end)
        if content.finish_reason is not None:
            self._reasons[index] = content.finish_reason
            if not self.is_over:
                self.generation.stop_choice(index)
        # What was sampled beyond a stop string is surplus, like its tokens.
        logprobs = step.logprobs[: len(content.token_ids)]
        return ChoiceDelta(self._first_index + index, content, logprobs, self._prompt_logprobs_for(index))

    def _prompt_logprobs_for(self, index: int) -> Sequence[TokenLogprob]:
        """Return those of the prompt with the first delta of each choice."""
        if index in self._begun:
            return ()
        self._begun.add(index)
        return self.generation.prompt_logprobs


class AnswerSource:
    """All choices of a request as they come, whichever of its prompts is served first.

    ``news`` is what the prompts' generations set when there is something to take; ``deadline`` is the request's
    last moment on the event loop's clock.
    """

    def __init__(
        self,
        prompts: Sequence[PromptAnswer],
        news: asyncio.Event,
        *,
        deadline: float,
        settings: AnswerSettings,
        times: AnswerTimes = NO_ANSWER_TIMES,
    ) -> None:
        self.times = times
        self._prompts = prompts
        self._news = news
        self._deadline = deadline
        self._settings = settings

    @property
    def num_choices(self) -> int:
        """How many choices there are."""
        return sum(prompt.num_choices for prompt in self._prompts)

    @property
    def is_over(self) -> bool:
        """Whether all choices have ended for the client."""
        return all(prompt.is_over for prompt in self._prompts)

    @property
    def has_ended(self) -> bool:
        """Whether the engines have ended everything, so that their counts are known."""
        return all(prompt.generation.has_ended for prompt in self._prompts)

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """Run all generations; at the end, who still looks for a place or waits for an engine stops."""
        running = [asyncio.create_task(self._run(prompt)) for prompt in self._prompts]
        try:
            yield
        finally:
            # As a rule all have ended, and an answer's end need not wait for two turns of the event loop.
            unfinished = [task for task in running if not task.done()]
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.gather(*unfinished, return_exceptions=True)

    async def next_deltas(self) -> list[ChoiceDelta] | None:
        """Return what came next; None when nothing came for the time of a heartbeat.

        Raises:
            OctavoError: a prompt could not be served or its engine failed; what came before was returned already.
        """
        loop, heartbeat_seconds = asyncio.get_running_loop(), self._settings.heartbeat_seconds
        wait_until = loop.time() + heartbeat_seconds
        while True:
            for prompt in self._prompts:
                if prompt.failure is not None and not prompt.generation.has_news:
                    raise prompt.failure
            try:
                async with asyncio.timeout_at(min(wait_until, self._deadline)):
                    await self._news.wait()
            except TimeoutError:
                if wait_until >= self._deadline:
                    raise deadline_exceeded() from None
                # Tokens that passed by were signs of life too.
                left_seconds = heartbeat_seconds - min(prompt.silent_seconds for prompt in self._prompts)
                if left_seconds <= 0:
                    self.times.waited()
                    return None
                wait_until = loop.time() + left_seconds
                continue
            self._news.clear()
            self.times.woke()
            if deltas := [delta for prompt in self._prompts for delta in prompt.take()]:
                self.times.took()
                return deltas

    @contextmanager
    def relayed(self, new_relay: NewRelay) -> Iterator[None]:
        """Let tokens pass by on relays while ``next_deltas`` has nothing else to return."""
        for prompt in self._prompts:
            prompt.begin_relay(new_relay)
        try:
            yield
        finally:
            for prompt in self._prompts:
                prompt.end_relay()

    async def usage(self) -> UsageCounts:
        """Return the counts of an answer that is over; engines get a moment to tell theirs."""
        settle_seconds = self._settings.abort_settle_seconds
        await asyncio.gather(*(prompt.generation.settle(settle_seconds) for prompt in self._prompts))
        counts = [prompt.usage() for prompt in self._prompts]
        return UsageCounts(
            num_prompt_tokens=sum(count.num_prompt_tokens for count in counts),
            num_completion_tokens=sum(count.num_completion_tokens for count in counts),
            num_cached_tokens=_sum_of_known([count.num_cached_tokens for count in counts]),
            num_reasoning_tokens=_sum_of_known([count.num_reasoning_tokens for count in counts]),
        )

    def finish(self) -> None:
        """Close the books of an answer that is over."""
        for prompt in self._prompts:
            prompt.finish()

    async def _run(self, prompt: PromptAnswer) -> None:
        try:
            await prompt.generation.run()
        except Exception as error:  # Whatever it is, it is raised where the answer is written.
            prompt.failure = error
        finally:
            self._news.set()


def _sum_of_known(counts: Sequence[int | None]) -> int | None:
    """Return the sum, or None where any is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


async def send_whole(source: AnswerSource, writer: AnswerWriter[Answered], answer_format: AnswerFormat) -> Answered:
    """Collect the answer and return it as one body."""
    choices = [WholeChoice() for _ in range(source.num_choices)]

    def new_relay(choice_index: int, output: OutputText, account: RequestAccount) -> Relay:
        return WholeRelay(choices[choice_index], output, account)

    async with source.started():
        while not source.is_over:
            with source.relayed(new_relay):
                deltas = await source.next_deltas()
            for delta in deltas or ():
                choices[delta.choice_index].add(delta)
    source.times.lap(Segment.FORMAT)
    counts = await source.usage()
    source.times.lap(Segment.SETTLE)
    num_logprobs = sum(choice.num_logprobs for choice in choices)
    body = await _written(lambda: answer_format.body(choices, counts), num_logprobs)
    source.finish()
    return writer.whole(body)


async def send_stream(
    source: AnswerSource, writer: AnswerWriter[Answered], answer_format: AnswerFormat, pieces: JsonPieces
) -> Answered:
    """Write the answer as it comes; an error is raised, whether or not the stream has begun."""
    writer.framing = answer_format.framing
    async with source.started():
        data = await _write_deltas(source, writer, answer_format, pieces)
    if answer_format.includes_usage:
        if not source.has_ended:
            # The engine is asked for its counts after a stop string; the client need not wait for the text.
            await writer.send(data)
            source.times.wrote()
            data = b""
        counts = await source.usage()
        source.times.lap(Segment.SETTLE)
        data += answer_format.usage_event(counts)
    response = await writer.finish(data)
    source.finish()
    return response


async def _write_deltas(
    source: AnswerSource, writer: AnswerWriter[Answered], answer_format: AnswerFormat, pieces: JsonPieces
) -> bytes:
    """Write the choices until their ends; the last events are left to the caller."""

    def new_relay(choice_index: int, output: OutputText, account: RequestAccount) -> TokenRelay | None:
        template = answer_format.text_template(choice_index)
        return None if template is None else TokenRelay(writer, template, output, account, pieces)

    while True:
        with source.relayed(new_relay):
            deltas = await source.next_deltas()
        if deltas is None:
            await writer.ping()
            source.times.wrote()
            continue
        data = await _events(answer_format, deltas)
        source.times.lap(Segment.FORMAT)
        if source.is_over:
            return data
        if data:
            await writer.send(data)
            source.times.wrote()


async def _events(answer_format: AnswerFormat, deltas: Sequence[ChoiceDelta]) -> bytes:
    num_logprobs = sum(delta.num_logprobs for delta in deltas)
    return await _written(lambda: b"".join(map(answer_format.events, deltas)), num_logprobs)


async def _written(write: Callable[[], bytes], num_logprobs: int) -> bytes:
    """Write a part of an answer: in a thread where it would hold others up."""
    return await asyncio.to_thread(write) if num_logprobs > _MANY_LOGPROBS else write()
