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


@dataclass
class _Sequence:
    token_ids: list[int]
    num_computed_tokens: int


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """One rank. ``break_next_step`` ends the stream in place of an answer; ``freeze`` never answers."""

    num_blocks: int = 64
    max_model_len: int = 512
    step_seconds: float = 0.0
    poisoned_token_id: int | None = None
    break_next_step: bool = False
    freeze: bool = False
    num_loads: int = 0
    steps: list[worker_pb2.ExecuteStepsRequest] = field(default_factory=list)

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
        sequences: dict[int, _Sequence] = {}
        async for step in request_iterator:
            self.steps.append(step)
            await asyncio.sleep(self.step_seconds)
            if self.freeze:
                await asyncio.Event().wait()
            if self.break_next_step:
                self.break_next_step = False
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker broke")
            yield self._answer(step, sequences)

    def _answer(
        self, step: worker_pb2.ExecuteStepsRequest, sequences: dict[int, _Sequence]
    ) -> worker_pb2.ExecuteStepsResponse:
        response = worker_pb2.ExecuteStepsResponse(step_id=step.step_id, step_duration=duration_from_seconds(0.001))
        for slot in step.ended_slots:
            del sequences[slot]
        for new in step.new_sequences:
            assert new.slot not in sequences, f"slot {new.slot} is in use"
            sequences[new.slot] = _Sequence(list(new.token_ids), new.num_computed_tokens)
        for slot, num_tokens in zip(step.slots, step.num_scheduled_tokens, strict=True):
            sequence = sequences[slot]
            sequence.num_computed_tokens += num_tokens
            if sequence.num_computed_tokens < len(sequence.token_ids):
                continue
            if self.poisoned_token_id in sequence.token_ids:
                response.failed_sequences.add(slot=slot, failure=worker_pb2.SEQUENCE_FAILURE_INVALID_LOGITS)
                continue
            sequence.token_ids.append(next_token(sequence.token_ids))
            response.slots.append(slot)
            response.num_tokens.append(1)
            response.token_ids.append(sequence.token_ids[-1])
        return response
