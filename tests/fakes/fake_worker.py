"""A worker that speaks the real protocol and computes nothing: a peer for tests of the engine.

Its tokens are a function of all tokens of the sequence, so a mix-up of slots or a lost token changes the output.
Faults are switched on from the test: slow steps, a broken stream, logits that are not numbers, silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from libs.protogen.worker.v1 import worker_pb2, worker_pb2_grpc
from libs.rpc import Registration, duration_from_seconds

VOCAB_SIZE = 1000
EOS_TOKEN_ID = 2


def next_token(token_ids: list[int]) -> int:
    """Return the token that follows; never the end token."""
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return 10 + value % (VOCAB_SIZE - 10)


def continuation(prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    """Return what the fake worker makes of a prompt."""
    token_ids = list(prompt_token_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt_token_ids) :]


# How long an answer is held for a next step that may never come.
_HOLD_SECONDS = 0.3


@dataclass
class WorkerSequence:
    """What the worker knows of a sequence."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """One rank; only rank 0 answers steps.

    ``break_next_step`` ends the stream in place of an answer; ``freeze`` never answers.
    ``holds_answers`` answers a step only when the next one has come, or after a while; ``num_overlapped_steps``
    counts how often it came. ``eos_after_tokens`` makes that output token, and all after it, the end token. With
    ``period`` the tokens come round after so many.
    """

    num_blocks: int = 64
    max_model_len: int = 512
    step_seconds: float = 0.0
    poisoned_token_id: int | None = None
    break_next_step: bool = False
    freeze: bool = False
    holds_answers: bool = False
    eos_after_tokens: int | None = None
    period: int | None = None
    num_loads: int = 0
    group_ids: list[str] = field(default_factory=list)
    rank: int = 0
    num_overlapped_steps: int = 0
    steps: list[worker_pb2.ExecuteStepsRequest] = field(default_factory=list)
    sequences: dict[int, WorkerSequence] = field(default_factory=dict)

    def registration(self) -> Registration:
        """Return what a server needs."""
        return Registration(
            worker_pb2_grpc.add_WorkerServiceServicer_to_server, self, "octavo.worker.v1.WorkerService"
        )

    async def LoadModel(
        self,
        request: worker_pb2.LoadModelRequest,
        context: grpc.aio.ServicerContext[worker_pb2.LoadModelRequest, worker_pb2.LoadModelResponse],
    ) -> AsyncIterator[worker_pb2.LoadModelResponse]:
        """Load nothing, with one progress report."""
        self.num_loads += 1
        self.group_ids.append(request.group_id)
        self.rank = request.rank
        yield worker_pb2.LoadModelResponse(
            progress=worker_pb2.LoadProgress(description="nothing", loaded_bytes=1, total_bytes=2)
        )
        yield worker_pb2.LoadModelResponse(
            model=worker_pb2.LoadedModel(
                num_blocks=self.num_blocks,
                block_size=request.block_size,
                max_model_len=self.max_model_len,
                eos_token_ids=[EOS_TOKEN_ID],
                tokenizer_digest=bytes(32),
                vocab_size=VOCAB_SIZE,
                gpu_type="FAKE",
                total_vram_bytes=1,
            )
        )

    async def ExecuteSteps(
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteStepsRequest],
        context: grpc.aio.ServicerContext[worker_pb2.ExecuteStepsRequest, worker_pb2.ExecuteStepsResponse],
    ) -> AsyncIterator[worker_pb2.ExecuteStepsResponse]:
        """Answer steps in order."""
        self.sequences.clear()
        steps: asyncio.Queue[worker_pb2.ExecuteStepsRequest] = asyncio.Queue()
        reader = asyncio.create_task(_read_into(steps, request_iterator))
        try:
            while True:
                step = await steps.get()
                self.steps.append(step)
                await asyncio.sleep(self.step_seconds)
                if self.freeze:
                    await asyncio.Event().wait()
                if self.break_next_step:
                    self.break_next_step = False
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker broke")
                if self.holds_answers:
                    self.num_overlapped_steps += await _comes_within(steps, _HOLD_SECONDS)
                answer = self._answer(step, self.sequences)
                if self.rank == 0:
                    yield answer
        finally:
            reader.cancel()

    def _answer(
        self, step: worker_pb2.ExecuteStepsRequest, sequences: dict[int, WorkerSequence]
    ) -> worker_pb2.ExecuteStepsResponse:
        response = worker_pb2.ExecuteStepsResponse(step_id=step.step_id, step_duration=duration_from_seconds(0.001))
        for slot in step.ended_slots:
            del sequences[slot]
        for new in step.new_sequences:
            assert new.slot not in sequences, f"slot {new.slot} is in use"
            sequences[new.slot] = WorkerSequence(
                list(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens, list(new.block_ids)
            )
        position = num_drafts_seen = 0
        for slot, num_tokens, num_new, num_drafts in zip(
            step.slots,
            step.num_scheduled_tokens,
            step.num_new_blocks,
            step.num_draft_tokens or [0] * len(step.slots),
            strict=True,
        ):
            sequence = sequences[slot]
            sequence.block_ids += step.new_block_ids[position : position + num_new]
            position += num_new
            drafts = list(step.draft_token_ids[num_drafts_seen : num_drafts_seen + num_drafts])
            num_drafts_seen += num_drafts
            sequence.num_computed_tokens += num_tokens - num_drafts
            assert not drafts or sequence.num_computed_tokens == len(sequence.token_ids)
            if sequence.num_computed_tokens < len(sequence.token_ids):
                continue
            if self.poisoned_token_id in sequence.token_ids:
                response.failed_sequences.add(slot=slot, failure=worker_pb2.SEQUENCE_FAILURE_INVALID_LOGITS)
                continue
            chosen = self._choose(sequence, drafts)
            sequence.num_computed_tokens += len(chosen) - 1
            response.slots.append(slot)
            response.num_tokens.append(len(chosen))
            response.token_ids.extend(chosen)
        return response

    def _choose(self, sequence: WorkerSequence, drafts: list[int]) -> list[int]:
        """Append the drafts that are right and the token after them."""
        chosen: list[int] = []
        for place in range(len(drafts) + 1):
            num_output = len(sequence.token_ids) - sequence.num_prompt_tokens + 1
            if self.eos_after_tokens is not None and num_output >= self.eos_after_tokens:
                chosen.append(EOS_TOKEN_ID)
            elif self.period is not None:
                chosen.append(10 + num_output % self.period)
            else:
                chosen.append(next_token(sequence.token_ids))
            sequence.token_ids.append(chosen[-1])
            if chosen != drafts[: place + 1]:
                break
        return chosen


async def _read_into(
    steps: asyncio.Queue[worker_pb2.ExecuteStepsRequest],
    request_iterator: AsyncIterator[worker_pb2.ExecuteStepsRequest],
) -> None:
    async for step in request_iterator:
        steps.put_nowait(step)


async def _comes_within(steps: asyncio.Queue[worker_pb2.ExecuteStepsRequest], seconds: float) -> bool:
    """Say whether another step is there before the time is up."""
    for _ in range(int(seconds / 0.005)):
        if not steps.empty():
            return True
        await asyncio.sleep(0.005)
    return False
