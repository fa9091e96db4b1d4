"""Log-probabilities on their way from workers to requests: whose they are, and what has been reported already.

A sequence that wants its prompt's reads no cached blocks beyond what it has reported, so that every token before is
computed; after a preemption what comes again is left out. Nothing here runs in a step in which nobody wants any.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.errors import InternalError
from libs.logprobs import TokenLogprobs
from services.engine.core.sequence_table import SequenceTable, Slots


@dataclass(frozen=True, slots=True, eq=False)
class SlotLogprobs:
    """Those of the tokens that a step gave; ``slots[i]`` got the i-th, and may come several times in a row."""

    slots: Slots
    tokens: TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class SlotPromptLogprobs:
    """Those of prompt tokens: of ``num_tokens[i]`` of ``slots[i]``, from ``positions[i]`` on."""

    slots: Slots
    positions: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    tokens: TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class HandleLogprobs:
    """What a step brought to requests: the next ``num_tokens[i]`` entries of ``handles[i]``."""

    handles: npt.NDArray[np.uint32]
    owners: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    tokens: TokenLogprobs

    def of_owner(self, owner: int) -> HandleLogprobs:
        """Return the share of one owner."""
        is_mine = self.owners == owner
        return HandleLogprobs(
            self.handles[is_mine],
            self.owners[is_mine],
            self.num_tokens[is_mine],
            self.tokens.take(np.repeat(is_mine, self.num_tokens)),
        )


def output_logprobs(
    table: SequenceTable, slots: Slots, num_tokens: npt.NDArray[np.int64], answered: SlotLogprobs | None
) -> HandleLogprobs | None:
    """Return those of the sequences in ``slots``, which have got ``num_tokens``; others have left meanwhile.

    Raises:
        InternalError: when the worker has not measured exactly those that want it.
    """
    if answered is None and not table.num_wanting_logprobs:
        return None
    is_wanting = table.wants_logprobs[slots]
    wanting, counts = slots[is_wanting], num_tokens[is_wanting]
    measured = answered.slots if answered is not None else slots[:0]
    is_taken = np.isin(measured, slots)
    if not np.array_equal(measured[is_taken], np.repeat(wanting, counts)):
        raise InternalError(
            f"Log-probabilities are wanted of {counts.tolist()} tokens of slots {wanting.tolist()}, but came of "
            f"{measured.tolist()}."
        )
    if answered is None or not len(wanting):
        return None
    return HandleLogprobs(
        table.handles[wanting].copy(),
        table.owners[wanting].copy(),
        counts,
        answered.tokens.take(is_taken),
    )


def prompt_logprobs(
    table: SequenceTable, slots: Slots, answered: SlotPromptLogprobs | None
) -> HandleLogprobs | None:
    """Return what is new of the prompts of the sequences in ``slots``, and note it as reported.

    Raises:
        InternalError: when a worker has left a token out.
    """
    if answered is None:
        return None
    is_new = np.zeros(len(answered.tokens), np.bool_)
    handles, owners, counts = [], [], []
    first = 0
    is_mine = np.isin(answered.slots, slots)
    for index, (slot, position, count) in enumerate(
        zip(answered.slots.tolist(), answered.positions.tolist(), answered.num_tokens.tolist(), strict=True)
    ):
        end, begin = first + count, first
        first = end
        if not is_mine[index]:
            continue
        sequence = table.sequence_at(slot)
        # The first prompt token has none, so the next to report has the position one beyond their number.
        num_known = sequence.num_prompt_logprobs_reported + 1 - position
        if num_known < 0:
            raise InternalError(
                f"Slot {slot} lacks the log-probabilities of {-num_known} prompt tokens before position {position}."
            )
        num_new = count - num_known
        if num_new <= 0:
            continue
        is_new[begin + num_known : end] = True
        sequence.num_prompt_logprobs_reported += num_new
        handles.append(sequence.handle)
        owners.append(sequence.request.owner)
        counts.append(num_new)
    if not handles:
        return None
    return HandleLogprobs(
        np.array(handles, np.uint32),
        np.array(owners, np.int64),
        np.array(counts, np.int64),
        answered.tokens.take(is_new),
    )
