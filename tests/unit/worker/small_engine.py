"""The engine's side of a runner, as little of it as tests need: slots, block tables and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from services.worker.step import (
    LoadedModel,
    LoadRequest,
    ModelRunner,
    NewSequence,
    SamplingParams,
    StepInput,
    StepResult,
)


def load_request(**changes: int | str | None) -> LoadRequest:
    values: dict[str, int | str | None] = {
        "rank": 0,
        "tensor_parallel_size": 1,
        "block_size": 4,
        "max_model_len": None,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
    }
    return LoadRequest(**(values | changes))  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def step(
    *,
    new: Sequence[NewSequence] = (),
    ended: Sequence[int] = (),
    scheduled: Sequence[tuple[int, int, Sequence[int]]] = (),
    copies: Sequence[tuple[int, int]] = (),
    drafts: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> StepInput:
    """Build a step; ``scheduled`` has slot, number of tokens and new blocks of each, ``drafts`` are by slot."""
    return StepInput(
        step_id=1,
        ended_slots=ints(*ended),
        new_sequences=tuple(new),
        refused_sequences=(),
        slots=ints(*(slot for slot, _, _ in scheduled)),
        num_scheduled_tokens=ints(*(count for _, count, _ in scheduled)),
        num_new_blocks=ints(*(len(blocks) for _, _, blocks in scheduled)),
        new_block_ids=ints(*(block for _, _, blocks in scheduled for block in blocks)),
        copy_source_block_ids=ints(*(source for source, _ in copies)),
        copy_target_block_ids=ints(*(target for _, target in copies)),
        num_draft_tokens=ints(*(len(drafts.get(slot, ())) for slot, _, _ in scheduled)),
        draft_token_ids=ints(*(token_id for slot, _, _ in scheduled for token_id in drafts.get(slot, ()))),
    )


def new_sequence(
    slot: int,
    token_ids: Sequence[int],
    *,
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    block_ids: Sequence[int] = (),
    params: SamplingParams | None = None,
    choice_index: int = 0,
) -> NewSequence:
    return NewSequence(
        slot=slot,
        token_ids=ints(*token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=ints(*block_ids),
        sampling_params=params or SamplingParams(),
        choice_index=choice_index,
    )


@dataclass
class Running:
    """What the engine knows of a sequence."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_known: bool = False
    has_failed: bool = False

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class SmallEngine:
    """Schedules every running sequence at each step, with blocks in random order.

    ``draft`` says what a sequence in a slot computes behind its last known token.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: LoadedModel,
        seed: int = 0,
        draft: Callable[[int, Running], Sequence[int]] = lambda slot, sequence: (),
    ) -> None:
        self.num_accepted_drafts = 0
        self.draft = draft
        self._runner = runner
        self._block_size = model.block_size
        self._free = np.random.default_rng(seed).permutation(model.num_blocks).tolist()
        self._ended: list[int] = []
        self.running: dict[int, Running] = {}

    def add(
        self,
        slot: int,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        output: Sequence[int] = (),
        shared_blocks: Sequence[int] = (),
    ) -> Running:
        """Begin a sequence; ``shared_blocks`` hold the computed beginning of its prompt."""
        sequence = Running([*prompt, *output], len(prompt), params or SamplingParams())
        sequence.block_ids = list(shared_blocks)
        sequence.num_computed_tokens = len(shared_blocks) * self._block_size
        self.running[slot] = sequence
        return sequence

    def end(self, slot: int) -> Running:
        """End a sequence; its blocks are free again, the last one first."""
        sequence = self.running.pop(slot)
        self._free.extend(reversed(sequence.block_ids))
        if sequence.is_known:
            self._ended.append(slot)
        return sequence

    def run_step(self, max_tokens_each: int = 1_000) -> StepResult:
        """Compute what is left of each sequence, at most so many tokens."""
        new: list[NewSequence] = []
        scheduled: list[tuple[int, int, list[int]]] = []
        drafts: dict[int, Sequence[int]] = {}
        for slot, sequence in self.running.items():
            if sequence.has_failed:
                continue
            if not sequence.is_known:
                new.append(self._new_sequence(slot, sequence))
                sequence.is_known = True
            count = min(max_tokens_each, len(sequence.token_ids) - sequence.num_computed_tokens)
            if sequence.num_computed_tokens + count == len(sequence.token_ids):
                drafts[slot] = self.draft(slot, sequence)
            total = count + len(drafts.get(slot, ()))
            num_blocks = -(-(sequence.num_computed_tokens + total) // self._block_size)
            blocks = [self._free.pop() for _ in range(num_blocks - len(sequence.block_ids))]
            sequence.block_ids += blocks
            sequence.num_computed_tokens += count
            scheduled.append((slot, total, blocks))
        result = self._runner.execute(step(new=new, ended=self._ended, scheduled=scheduled, drafts=drafts))
        self._ended = []
        parts = np.split(result.token_ids, np.cumsum(result.num_tokens)[:-1])
        for slot, token_ids in zip(result.slots.tolist(), parts, strict=False):
            self.running[slot].token_ids += token_ids.tolist()
            self.running[slot].num_computed_tokens += len(token_ids) - 1
            self.num_accepted_drafts += len(token_ids) - 1
        for failed in result.failed_sequences:
            self.running[failed.slot].has_failed = True
        return result

    def run_until(self, num_output_tokens: int, max_tokens_each: int = 1_000) -> dict[int, list[int]]:
        """Run steps until each sequence has at least so many output tokens; return that many of each."""
        while any(len(s.output) < num_output_tokens and not s.has_failed for s in self.running.values()):
            self.run_step(max_tokens_each)
        return {slot: sequence.output[:num_output_tokens] for slot, sequence in self.running.items()}

    def _new_sequence(self, slot: int, sequence: Running) -> NewSequence:
        return new_sequence(
            slot,
            sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=sequence.block_ids,
            params=sequence.params,
        )
