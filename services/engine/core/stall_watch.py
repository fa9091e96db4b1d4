"""Which tokens came later than their request bears, and why.

Owns the judgement. It is asked only while a running sequence asked for timings, and costs a few vector expressions
for each step then.
"""

from __future__ import annotations

import numpy as np

from services.engine.core.scheduler_output import SchedulerOutput
from services.engine.core.sequence_table import SequenceTable, Slots
from services.engine.core.timings import Stall, StallReason


class StallWatch:
    """Compares the time since each row's last token with its bound; remembers nothing itself."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    def note(self, output: SchedulerOutput, step_seconds: float, token_slots: Slots, now: float) -> None:
        """Take a step and the rows that got tokens in it."""
        table = self._table
        gaps = now - table.last_token_times[token_slots]
        late = np.flatnonzero(gaps > table.stall_bounds[token_slots]).tolist()
        num_prefill_tokens = self._num_prefill_tokens(output) if late else 0
        for index in late:
            sequence = table.sequence_at(int(token_slots[index]))
            timings, gap_seconds = sequence.timings, float(gaps[index])
            assert timings is not None, f"handle {sequence.handle} has a bound and no timings"
            was_preempted = sequence.num_preemptions > timings.num_preemptions_seen
            timings.num_preemptions_seen = sequence.num_preemptions
            reason = _reason(gap_seconds, step_seconds, num_prefill_tokens, was_preempted=was_preempted)
            timings.add(Stall(output.step_id, gap_seconds, reason, step_seconds, num_prefill_tokens))
        table.last_token_times[token_slots] = now

    def _num_prefill_tokens(self, output: SchedulerOutput) -> int:
        num_tokens = output.num_known_tokens
        is_prefill = output.num_computed_tokens - num_tokens < self._table.num_prompt_tokens[output.slots]
        return int(num_tokens[is_prefill].sum())


def _reason(
    gap_seconds: float, step_seconds: float, num_prefill_tokens: int, *, was_preempted: bool
) -> StallReason:
    """Judge by the step that ended the gap; a gap that it fills less than half has its cause outside of it."""
    if was_preempted:
        return StallReason.PREEMPTION
    if step_seconds < gap_seconds / 2:
        return StallReason.ENGINE_WAIT
    return StallReason.PREFILL if num_prefill_tokens else StallReason.LONG_STEP
