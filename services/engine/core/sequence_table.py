"""The hot state of running sequences: a structure of arrays with one row, called slot, for each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.engine.core.request import Sequence, TokenIds

Slots = npt.NDArray[np.int64]

# Handles count from one; a row without a sequence has this.
NO_HANDLE = 0


class SequenceTable:
    """Rows ``0 … max_num_seqs-1``; the arrays may be read and written by the scheduler and the KV cache manager.

    ``token_ids`` ``[max_num_seqs, max_model_len]`` and ``block_table`` ``[max_num_seqs, max_blocks]`` are reserved
    in full but cost memory only where they are written. ``work_done`` counts the tokens computed since the row was
    taken. ``terms`` changes whenever a row is taken or given back. ``num_tokens`` includes
    ``num_unconfirmed_tokens``: tokens of steps that are sent but not answered yet, whose value only the worker
    knows.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.uint32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.num_committed_blocks = np.zeros(max_num_seqs, np.int64)
        self.max_num_tokens = np.zeros(max_num_seqs, np.int64)
        self.handles = np.zeros(max_num_seqs, np.uint32)
        self.owners = np.zeros(max_num_seqs, np.int64)
        self.ignores_eos = np.zeros(max_num_seqs, np.bool_)
        self.has_stop_token_ids = np.zeros(max_num_seqs, np.bool_)
        self.wants_logprobs = np.zeros(max_num_seqs, np.bool_)
        self.num_wanting_logprobs = 0
        # Of rows that asked for timings; no gap is beyond the bound of the others.
        self.stall_bounds = np.full(max_num_seqs, np.inf)
        self.last_token_times = np.zeros(max_num_seqs)
        self.num_wanting_timings = 0
        self.arrival_numbers = np.zeros(max_num_seqs, np.int64)
        self.priorities = np.zeros(max_num_seqs, np.int64)
        self.place_times = np.zeros(max_num_seqs, np.float64)
        self.num_unconfirmed_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_output_tokens_expected = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.has_first_token = np.zeros(max_num_seqs, np.bool_)
        self.work_done = np.zeros(max_num_seqs, np.int64)
        self.terms = np.zeros(max_num_seqs, np.int64)
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self._is_active = np.zeros(max_num_seqs, np.bool_)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._active_slots: Slots | None = None

    @property
    def num_active(self) -> int:
        """Rows in use."""
        return len(self.sequences) - len(self._free_slots)

    @property
    def has_free_slot(self) -> bool:
        """Whether a row is left."""
        return bool(self._free_slots)

    @property
    def active_slots(self) -> Slots:
        """Rows in use, ascending; the same array until a row is taken or given back."""
        if self._active_slots is None:
            self._active_slots = np.flatnonzero(self._is_active)
        return self._active_slots

    def take(self, sequence: Sequence, *, expected_output_tokens: int) -> int:
        """Give a sequence a row and fill it; its blocks come from the KV cache manager."""
        slot = self._free_slots.pop()
        num_tokens = len(sequence.token_ids)
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_tokens[slot] = num_tokens
        self.num_computed_tokens[slot] = 0
        self.num_blocks[slot] = 0
        self.num_committed_blocks[slot] = 0
        self.max_num_tokens[slot] = sequence.max_num_tokens
        self.handles[slot] = sequence.handle
        self.arrival_numbers[slot] = sequence.arrival_number
        self.priorities[slot] = sequence.request.priority
        self.place_times[slot] = sequence.place_time
        self.num_unconfirmed_tokens[slot] = 0
        self.num_output_tokens_expected[slot] = expected_output_tokens
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.owners[slot] = sequence.request.owner
        self.ignores_eos[slot] = sequence.request.stop_criteria.ignore_eos
        self.has_stop_token_ids[slot] = bool(sequence.request.stop_criteria.stop_token_ids)
        self.wants_logprobs[slot] = sequence.request.num_logprobs is not None
        self.num_wanting_logprobs += sequence.request.num_logprobs is not None
        self._take_timings(slot, sequence)
        self.has_first_token[slot] = sequence.first_token_time is not None
        self.work_done[slot] = 0
        self.terms[slot] += 1
        self.sequences[slot] = sequence
        self._is_active[slot] = True
        self._active_slots = None
        sequence.slot = slot
        return slot

    def give_back(self, slot: int) -> None:
        """Empty a row; the sequence takes its tokens with it."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty already"
        sequence.token_ids = self.known_token_ids(slot).copy()
        sequence.num_computed_tokens_total += int(self.work_done[slot])
        sequence.slot = None
        self.num_wanting_logprobs -= sequence.request.num_logprobs is not None
        if sequence.timings is not None:
            sequence.timings.last_token_time = float(self.last_token_times[slot])
            self.num_wanting_timings -= 1
        self.handles[slot] = NO_HANDLE
        self.terms[slot] += 1
        self.sequences[slot] = None
        self._is_active[slot] = False
        self._active_slots = None
        self._free_slots.append(slot)

    def _take_timings(self, slot: int, sequence: Sequence) -> None:
        timings, bound = sequence.timings, sequence.request.stall_bound_seconds
        if timings is None or bound is None:
            self.stall_bounds[slot] = np.inf
            return
        self.stall_bounds[slot] = bound
        self.last_token_times[slot] = timings.last_token_time
        self.num_wanting_timings += 1

    def in_line(self, slots: Slots) -> Slots:
        """Return the rows by place in line."""
        return slots[np.lexsort((self.arrival_numbers[slots], self.place_times[slots]))]

    def sequence_at(self, slot: int) -> Sequence:
        """Return the sequence of a row in use."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def known_token_ids(self, slot: int) -> TokenIds:
        """Return a view of prompt and output so far, without tokens that are still being sampled."""
        return self.token_ids[slot, : self.num_tokens[slot] - self.num_unconfirmed_tokens[slot]]

    def remaining_output_tokens(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Return how many more output tokens to expect of each row.

        One that has outlived what was expected of it is expected to go on as long as it has, up to its limit: the
        longer an output is, the longer it will be.
        """
        num_output = self.num_tokens[slots] - self.num_prompt_tokens[slots]
        left = self.num_output_tokens_expected[slots] - num_output
        expected = np.where(left > 0, left, num_output)
        remaining: npt.NDArray[np.int64] = np.minimum(expected, self.max_num_tokens[slots] - self.num_tokens[slots])
        return remaining

    def blocks(self, slot: int) -> list[int]:
        """Return the block table of a row."""
        return [int(block) for block in self.block_table[slot, : self.num_blocks[slot]]]
