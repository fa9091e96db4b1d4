"""What a worker knows of its sequences, and the flat batch of a step.

Owns token ids, computed counts and block tables by slot, applies a step's difference to them and checks that
it fits. It must not know tensors, sampling or who a sequence belongs to. All of it is numpy, with vector
expressions over the step; Python touches a sequence only when it begins.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.errors import ClientError, InternalError, InvalidRequest
from libs.obs import get_logger
from services.worker.step import FailedSequence, IntArray, NewSequence, SequenceFailure, StepInput

_log = get_logger("input_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds that every step keeps."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    vocab_size: int

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


def ranges(firsts: IntArray, counts: IntArray) -> IntArray:
    """Return ``counts[i]`` numbers from ``firsts[i]`` on, one range after the other."""
    begins = np.cumsum(counts) - counts
    numbers: IntArray = np.arange(int(counts.sum())) + np.repeat(firsts - begins, counts)
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """One step's tokens, one sequence after the other, and where they go."""

    slots: IntArray  # [num_seqs]
    first_rows: IntArray  # [num_seqs]: row of the first token
    num_queries: IntArray  # [num_seqs]
    context_lens: IntArray  # [num_seqs]: tokens in the cache after the step
    block_tables: NDArray[np.int32]  # [num_seqs, max_blocks]; beyond a sequence's blocks the null block
    token_ids: IntArray  # [num_tokens]
    positions: IntArray  # [num_tokens]
    slot_mapping: IntArray  # [num_tokens]
    is_sampled: NDArray[np.bool_]  # [num_seqs]: whether the last known token is computed
    num_drafts: IntArray  # [num_seqs]: how many of the queries are drafts, the last ones

    @property
    def last_rows(self) -> IntArray:
        """Rows of each sequence's last token."""
        return self.first_rows + self.num_queries - 1

    @property
    def sampled_rows(self) -> IntArray:
        """Rows whose logits are due: of each sampled sequence its last known token's and its drafts'."""
        return self.sampled_rows_of(self.is_sampled)

    def sampled_rows_of(self, is_chosen: NDArray[np.bool_]) -> IntArray:
        """Return those of the sampled sequences that ``is_chosen`` ``[num_seqs]`` names."""
        last_rows, num_drafts = self.last_rows[is_chosen], self.num_drafts[is_chosen]
        return ranges(last_rows - num_drafts, num_drafts + 1) if num_drafts.any() else last_rows

    @property
    def digest(self) -> int:
        """32 bits that differ between batches of other tokens, places or sampled sequences, but for rare cases."""
        parts: tuple[NDArray[np.generic], ...] = (
            self.token_ids,
            self.slot_mapping,
            self.is_sampled,
            self.num_drafts,
        )
        digest = 0
        for part in parts:
            digest = zlib.crc32(part.tobytes(), digest)
        return digest

    def rows_of(self, is_chosen: NDArray[np.bool_]) -> IntArray:
        """Return the rows of the sequences that ``is_chosen`` ``[num_seqs]`` names."""
        return np.flatnonzero(np.repeat(is_chosen, self.num_queries))


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """What is left of a step after its difference has been applied."""

    batch: FlatBatch | None  # None when nothing is to be computed
    failed_sequences: tuple[FailedSequence, ...]  # refused now, or scheduled though they had failed before


class InputBatch:
    """Sequences by slot."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        rows = limits.max_num_seqs
        # One column more than the longest sequence: its last token may be sampled before the engine ends it.
        # What no sequence reaches of this table is never touched, so it takes no memory.
        self._token_ids = np.zeros((rows, limits.max_model_len + 1), dtype=np.int32)
        self._block_tables = np.full((rows, limits.max_blocks_per_seq), limits.num_blocks, dtype=np.int32)
        self._num_tokens = np.zeros(rows, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(rows, dtype=np.int64)
        self._num_computed_tokens = np.zeros(rows, dtype=np.int64)
        self._num_blocks = np.zeros(rows, dtype=np.int64)
        self._is_known = np.zeros(rows, dtype=np.bool_)
        self._has_failed = np.zeros(rows, dtype=np.bool_)
        self._failures: dict[int, FailedSequence] = {}  # by slot

    def reset(self) -> None:
        """Forget all sequences."""
        self._end(np.flatnonzero(self._is_known))

    def prepare(self, step: StepInput, admit: Callable[[NewSequence], None]) -> PreparedStep:
        """Apply a step's difference and lay out its tokens.

        ``admit`` is called with each new sequence and may raise a ClientError, which fails that sequence alone.

        Raises:
            InternalError: when the step contradicts what is known here.
        """
        self._end(step.ended_slots)
        refused: dict[int, ClientError] = {}
        for refusal in step.refused_sequences:
            self._occupy(refusal.slot)
            refused[refusal.slot] = refusal.error
        for sequence in step.new_sequences:
            self._occupy(sequence.slot)
            try:
                self._fill(sequence)
                admit(sequence)
            except ClientError as error:
                refused[sequence.slot] = error
        for slot, refusal_error in refused.items():
            _log.error("sequence refused", slot=slot, reason=refusal_error.message)
            self.fail(slot, SequenceFailure.REFUSED, refusal_error.message)
        self._check_scheduled(step)
        is_alive = ~self._has_failed[step.slots]
        failed_slots = dict.fromkeys([*refused, *step.slots[~is_alive].tolist()])
        self._append_blocks(step.slots, step.num_new_blocks, step.new_block_ids, is_alive)
        self._write_drafts(step, is_alive)
        return PreparedStep(
            batch=self._flatten(
                step.slots[is_alive], step.num_scheduled_tokens[is_alive], step.num_draft_tokens[is_alive]
            )
            if is_alive.any()
            else None,
            failed_sequences=tuple(self._failures[slot] for slot in failed_slots),
        )

    def fail(self, slot: int, failure: SequenceFailure, message: str) -> FailedSequence:
        """Remember that a sequence cannot go on; it is not computed until it ends."""
        self._has_failed[slot] = True
        self._failures[slot] = FailedSequence(slot, failure, message)
        return self._failures[slot]

    def commit(self, batch: FlatBatch, sampled_slots: IntArray, num_tokens: IntArray, token_ids: IntArray) -> None:
        """Record that the batch is computed and append ``num_tokens[i]`` of ``token_ids`` to each sampled sequence.

        All but the last of them are drafts that were accepted. What was computed for the others is void: it lies
        behind the computed tokens and is overwritten.
        """
        self._num_computed_tokens[batch.slots] = batch.context_lens - batch.num_drafts
        self._num_computed_tokens[sampled_slots] += num_tokens - 1
        columns = ranges(self._num_tokens[sampled_slots], num_tokens)
        self._token_ids[np.repeat(sampled_slots, num_tokens), columns] = token_ids
        self._num_tokens[sampled_slots] += num_tokens

    def num_output_tokens(self, slots: IntArray) -> IntArray:
        """Return how many output tokens each sequence has."""
        return self._num_tokens[slots] - self._num_prompt_tokens[slots]

    def num_prompt_tokens(self, slot: int) -> int:
        """Return how many of the sequence's tokens are prompt."""
        return int(self._num_prompt_tokens[slot])

    def token_ids_of(self, slot: int, num_drafts: int = 0) -> NDArray[np.int32]:
        """Return all known tokens of a sequence and the first of the drafts behind them, as a view."""
        return self._token_ids[slot, : self._num_tokens[slot] + num_drafts]

    def draft_token_ids(self, slots: IntArray, place: int) -> IntArray:
        """Return the draft that each sequence has at this place behind its known tokens, ``[num_slots]``."""
        return self._token_ids[slots, self._num_tokens[slots] + place].astype(np.int64)

    def _end(self, slots: IntArray) -> None:
        if not len(slots):
            return
        self._check_slots(slots)
        if not self._is_known[slots].all():
            raise InternalError(f"The slots {slots[~self._is_known[slots]].tolist()} end, but hold no sequence.")
        self._is_known[slots] = False
        self._has_failed[slots] = False
        self._block_tables[slots] = self._limits.num_blocks
        self._num_blocks[slots] = 0
        for slot in slots.tolist() if self._failures else ():
            self._failures.pop(slot, None)

    def _occupy(self, slot: int) -> None:
        self._check_slots(np.array([slot]))
        if self._is_known[slot]:
            raise InternalError(f"A new sequence takes slot {slot}, which holds one already.")
        self._is_known[slot] = True

    def _fill(self, sequence: NewSequence) -> None:
        slot, num_tokens = sequence.slot, len(sequence.token_ids)
        if not 1 <= sequence.num_prompt_tokens <= num_tokens <= self._limits.max_model_len:
            raise InternalError(
                f"The sequence of slot {slot} has {sequence.num_prompt_tokens} prompt tokens and {num_tokens} in "
                f"all; the limit is {self._limits.max_model_len}."
            )
        if not 0 <= sequence.num_computed_tokens < num_tokens:
            raise InternalError(
                f"The sequence of slot {slot} has {sequence.num_computed_tokens} of {num_tokens} tokens computed; "
                "at least one must be left."
            )
        if sequence.token_ids.min() < 0 or sequence.token_ids.max() >= self._limits.vocab_size:
            raise InvalidRequest(
                f"The token ids reach from {sequence.token_ids.min()} to {sequence.token_ids.max()}, but the "
                f"vocabulary has {self._limits.vocab_size} tokens.",
                param="token_ids",
            )
        self._token_ids[slot, :num_tokens] = sequence.token_ids
        self._num_tokens[slot] = num_tokens
        self._num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self._num_computed_tokens[slot] = sequence.num_computed_tokens
        self._append_blocks(
            np.array([slot]), np.array([len(sequence.block_ids)]), sequence.block_ids, np.array([True])
        )

    def _write_drafts(self, step: StepInput, is_alive: NDArray[np.bool_]) -> None:
        """Write drafts behind the known tokens; they are forgotten unless ``commit`` appends them."""
        if not len(step.draft_token_ids):
            return
        if step.draft_token_ids.min() < 0 or step.draft_token_ids.max() >= self._limits.vocab_size:
            raise InternalError(
                f"The drafts reach from {step.draft_token_ids.min()} to {step.draft_token_ids.max()}, but the "
                f"vocabulary has {self._limits.vocab_size} tokens."
            )
        token_ids = step.draft_token_ids[np.repeat(is_alive, step.num_draft_tokens)]
        slots, num_drafts = step.slots[is_alive], step.num_draft_tokens[is_alive]
        beyond = self._num_tokens[slots] + num_drafts > self._limits.max_model_len
        if beyond.any():
            raise InternalError(
                f"The slots {slots[beyond].tolist()} have {self._num_tokens[slots][beyond].tolist()} tokens and "
                f"{num_drafts[beyond].tolist()} drafts; the limit is {self._limits.max_model_len}."
            )
        columns = ranges(self._num_tokens[slots], num_drafts)
        self._token_ids[np.repeat(slots, num_drafts), columns] = token_ids

    def _flatten(self, slots: IntArray, num_queries: IntArray, num_drafts: IntArray) -> FlatBatch:
        context_lens = self._num_computed_tokens[slots] + num_queries
        self._check_contexts(slots, context_lens, num_drafts)
        first_rows = np.cumsum(num_queries) - num_queries
        sequences = np.repeat(np.arange(len(slots)), num_queries)
        token_slots = slots[sequences]
        positions = np.arange(len(sequences)) - first_rows[sequences] + self._num_computed_tokens[token_slots]
        block_size = self._limits.block_size
        blocks = self._block_tables[token_slots, positions // block_size].astype(np.int64)
        return FlatBatch(
            slots=slots,
            first_rows=first_rows,
            num_queries=num_queries,
            context_lens=context_lens,
            block_tables=self._block_tables[slots, : -(-int(context_lens.max()) // block_size)],
            token_ids=self._token_ids[token_slots, positions].astype(np.int64),
            positions=positions,
            slot_mapping=blocks * block_size + positions % block_size,
            is_sampled=context_lens == self._num_tokens[slots] + num_drafts,
            num_drafts=num_drafts,
        )

    def _append_blocks(
        self,
        slots: IntArray,
        num_new_blocks: IntArray,
        block_ids: IntArray,
        is_used: NDArray[np.bool_],
    ) -> None:
        if num_new_blocks.sum() != len(block_ids):
            raise InternalError(f"{num_new_blocks.sum()} new blocks are announced, but {len(block_ids)} are named.")
        if not len(block_ids):
            return
        if block_ids.min() < 0 or block_ids.max() >= self._limits.num_blocks:
            raise InternalError(
                f"Blocks from {block_ids.min()} to {block_ids.max()} are named, but there are "
                f"{self._limits.num_blocks}."
            )
        if not is_used.all():
            block_ids = block_ids[np.repeat(is_used, num_new_blocks)]
            slots, num_new_blocks = slots[is_used], num_new_blocks[is_used]
        num_blocks = self._num_blocks[slots] + num_new_blocks
        if len(num_blocks) and num_blocks.max() > self._limits.max_blocks_per_seq:
            raise InternalError(
                f"A sequence would have {num_blocks.max()} blocks; the longest has "
                f"{self._limits.max_blocks_per_seq}."
            )
        first = np.cumsum(num_new_blocks) - num_new_blocks
        sequences = np.repeat(np.arange(len(slots)), num_new_blocks)
        columns = np.arange(len(sequences)) - first[sequences] + self._num_blocks[slots][sequences]
        self._block_tables[slots[sequences], columns] = block_ids
        self._num_blocks[slots] = num_blocks

    def _check_slots(self, slots: IntArray) -> None:
        if len(slots) and (slots.min() < 0 or slots.max() >= self._limits.max_num_seqs):
            raise InternalError(f"Slots {slots.tolist()} are named, but there are {self._limits.max_num_seqs}.")

    def _check_scheduled(self, step: StepInput) -> None:
        slots, num_queries = step.slots, step.num_scheduled_tokens
        if not len(slots) == len(num_queries) == len(step.num_new_blocks):
            raise InternalError(
                f"Step {step.step_id} schedules {len(slots)} slots, {len(num_queries)} token counts and "
                f"{len(step.num_new_blocks)} block counts."
            )
        if len(step.num_draft_tokens) != len(slots) or step.num_draft_tokens.sum() != len(step.draft_token_ids):
            raise InternalError(
                f"Step {step.step_id} has {len(step.draft_token_ids)} drafts for {len(slots)} slots, but announces "
                f"{step.num_draft_tokens.tolist()}."
            )
        self._check_slots(slots)
        if len(set(slots.tolist())) != len(slots):
            raise InternalError(f"Step {step.step_id} schedules a slot twice: {slots.tolist()}.")
        if not self._is_known[slots].all():
            raise InternalError(
                f"The slots {slots[~self._is_known[slots]].tolist()} are scheduled, but hold no sequence."
            )
        if len(slots) and num_queries.min() < 1:
            raise InternalError(f"Step {step.step_id} schedules token counts {num_queries.tolist()}.")
        if num_queries.sum() > self._limits.max_num_batched_tokens:
            raise InternalError(
                f"Step {step.step_id} schedules {num_queries.sum()} tokens; the limit is "
                f"{self._limits.max_num_batched_tokens}."
            )

    def _check_contexts(self, slots: IntArray, context_lens: IntArray, num_drafts: IntArray) -> None:
        num_tokens = self._num_tokens[slots] + num_drafts
        # Drafts come behind the last known token, so a sequence with drafts computes all that it has.
        wrong = np.where(num_drafts > 0, context_lens != num_tokens, context_lens > num_tokens)
        if wrong.any():
            raise InternalError(
                f"The slots {slots[wrong].tolist()} are scheduled up to {context_lens[wrong].tolist()} tokens, "
                f"but have {num_tokens[wrong].tolist()}, {num_drafts[wrong].tolist()} of them drafts."
            )
        if context_lens.max() > self._limits.max_model_len:
            raise InternalError(
                f"A sequence is scheduled up to {context_lens.max()} tokens; the limit is "
                f"{self._limits.max_model_len}."
            )
        room = self._num_blocks[slots] * self._limits.block_size
        if (context_lens > room).any():
            crowded = context_lens > room
            raise InternalError(
                f"The slots {slots[crowded].tolist()} need room for {context_lens[crowded].tolist()} tokens, but "
                f"their blocks hold {room[crowded].tolist()}."
            )
