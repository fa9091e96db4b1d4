"""A worker that keeps a real KV memory, for tests of everything that decides what workers compute.

It knows only what a worker would know: steps as differences. The KV of a token is a digest of the KV of the token
before it, *read from memory through the block table*, and of its own id; the sampled token is a function of the
last digest. So it answers like a model would: a block table that points at wrong contents gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from services.engine.core.scheduler_output import NewSequence, SchedulerOutput, StepResult

_MASK = (1 << 64) - 1
_ROOT = 0x9E3779B97F4A7C15
_GARBAGE = 0xDEAD_BEEF_DEAD_BEEF

# Chooses a token from the KV of the last known token, the place in the output and the choice.
Sampler = Callable[[int, int, int], int]


def extend_digest(previous: int, token_id: int) -> int:
    """Return the KV of a token after a prefix."""
    mixed = ((previous ^ (token_id + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 31)


def digests_of(token_ids: Sequence[int]) -> list[int]:
    """Return the KV that each token of a sequence should have."""
    return list(accumulate(token_ids, extend_digest, initial=_ROOT))[1:]


def greedy(vocab_size: int) -> Sampler:
    """Sample like a model does: the token is a fixed function of the KV of the last one, and of the choice."""
    return lambda digest, output_position, choice_index: ((digest >> 17) + 7919 * choice_index) % vocab_size


def counting(first_token_id: int) -> Sampler:
    """Sample ascending ids, for transcripts that a reader can follow."""
    return lambda digest, output_position, choice_index: first_token_id + 50 * choice_index + output_position


@dataclass(slots=True)
class Row:
    """What the worker knows of the sequence in a slot; ``digests`` are those that its tokens should have."""

    handle: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    choice_index: int
    # KV of the last computed token, as read from memory.
    last_digest: int = 0
    digests: list[int] = field(default_factory=list)

    def learn_digests(self) -> None:
        for token_id in self.token_ids[len(self.digests) :]:
            self.digests.append(extend_digest(self.digests[-1] if self.digests else _ROOT, token_id))


class FakeKVWorker:
    """Executes steps in a flat KV memory of ``num_blocks * block_size`` places."""

    def __init__(self, num_blocks: int, block_size: int, sample: Sampler) -> None:
        self.block_size = block_size
        self.rows: dict[int, Row] = {}
        self._sample = sample
        # Never cleared when a block changes hands, as on an accelerator.
        self._memory: npt.NDArray[np.uint64] = np.full(num_blocks * block_size, _GARBAGE, np.uint64)
        self._writers = np.zeros(num_blocks * block_size, np.int64)

    def take(self, output: SchedulerOutput) -> dict[int, Row]:
        """Apply a step's difference; returns the rows that ended, by slot."""
        ended = {slot: self.rows.pop(slot) for slot in output.ended_slots}
        handle_of = dict(zip(output.slots.tolist(), output.handles.tolist(), strict=True))
        for new in output.new_sequences:
            assert new.slot not in self.rows, f"slot {new.slot} is not free"
            self.rows[new.slot] = self._new_row(new, handle_of[new.slot])
        position = 0
        for slot, count in zip(output.slots.tolist(), output.num_new_blocks.tolist(), strict=True):
            self.rows[slot].block_ids += output.new_block_ids[position : position + count].tolist()
            position += count
        assert position == len(output.new_block_ids), "new blocks that belong to no slot"
        return ended

    def execute(self, output: SchedulerOutput, failed_slots: Sequence[int] = ()) -> StepResult:
        """Compute a step that was taken; ``failed_slots`` get no token."""
        for slot, count in zip(output.slots.tolist(), output.num_scheduled_tokens.tolist(), strict=True):
            self._check_is_only_writer(slot, count)
            self._compute(self.rows[slot], count)
        sampled = [slot for slot in output.slots[output.is_sampled].tolist() if slot not in failed_slots]
        token_ids = []
        for slot in sampled:
            row = self.rows[slot]
            assert row.num_computed_tokens == len(row.token_ids), f"slot {slot} is sampled before its last token"
            position = len(row.token_ids) - row.num_prompt_tokens
            row.token_ids.append(self._sample(row.last_digest, position, row.choice_index))
            token_ids.append(row.token_ids[-1])
        return StepResult(
            step_id=output.step_id,
            slots=np.array(sampled, np.int64),
            token_ids=np.array(token_ids, np.uint32),
            failed_slots=tuple(failed_slots),
            step_seconds=0.001,
        )

    def wrong_contents(self) -> list[str]:
        """Compare memory with what each sequence's computed tokens should have left there."""
        faults = []
        for slot, row in self.rows.items():
            places = self._places(row, 0, row.num_computed_tokens)
            row.learn_digests()
            expected = np.array(row.digests[: row.num_computed_tokens], np.uint64)
            wrong = np.flatnonzero(self._memory[places] != expected)
            if len(wrong):
                faults.append(f"slot {slot} (handle {row.handle}) finds foreign contents at position {wrong[0]}")
        return faults

    def writers(self, row: Row) -> set[int]:
        """Return the handles whose computed contents a sequence reads."""
        return set(self._writers[self._places(row, 0, row.num_computed_tokens)].tolist())

    def block_contents(self, block: int) -> list[int]:
        """Return the digests in a block."""
        return self._memory[block * self.block_size : (block + 1) * self.block_size].tolist()  # type: ignore[no-any-return]

    def _new_row(self, new: NewSequence, handle: int) -> Row:
        return Row(
            handle=handle,
            token_ids=new.token_ids.tolist(),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=list(new.block_ids),
            choice_index=new.choice_index,
        )

    def _check_is_only_writer(self, slot: int, count: int) -> None:
        row = self.rows[slot]
        first, last = row.num_computed_tokens, row.num_computed_tokens + count - 1
        written = set(row.block_ids[first // self.block_size : last // self.block_size + 1])
        for other_slot, other in self.rows.items():
            shared = written.intersection(other.block_ids) if other_slot != slot else set()
            assert not shared, f"slot {slot} writes to blocks {shared}, which slot {other_slot} reads"

    def _compute(self, row: Row, count: int) -> None:
        first, last = row.num_computed_tokens, row.num_computed_tokens + count
        assert 1 <= count <= len(row.token_ids) - first, f"{count} tokens after {first} of {len(row.token_ids)}"
        assert last <= len(row.block_ids) * self.block_size, f"{len(row.block_ids)} blocks for {last} tokens"
        digest = int(self._memory[self._places(row, first - 1, first)[0]]) if first else _ROOT
        places = self._places(row, first, last)
        for place, token_id in zip(places.tolist(), row.token_ids[first:last], strict=True):
            digest = extend_digest(digest, token_id)
            self._memory[place] = digest
        self._writers[places] = row.handle
        row.last_digest = digest
        row.num_computed_tokens = last
        row.learn_digests()

    def _places(self, row: Row, first: int, last: int) -> npt.NDArray[np.int64]:
        positions = np.arange(first, last)
        blocks = np.array(row.block_ids, np.int64)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size
