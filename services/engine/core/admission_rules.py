"""Why a waiting request must wait: one small object for each reason."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from services.engine.core.request import Sequence
from services.engine.core.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True)
class Candidate:
    """The first in line, with what it could start from and how many output tokens to expect of it."""

    sequence: Sequence
    hit: PrefixHit
    expected_output_tokens: int


class AdmissionRule(Protocol):
    """Judges whether the first in line may join the running set in this step."""

    @property
    def name(self) -> str:
        """Short reason for metrics and explanations."""
        ...

    def begin_pass(self) -> None:
        """Note that a scheduling pass begins."""

    def allows(self, candidate: Candidate) -> bool:
        """Say yes, or make it and all behind it wait."""
        ...


@dataclass(frozen=True, slots=True)
class WholePromptFits:
    """Blocks for all known tokens and the next are available, with a watermark left for those that run.

    Without room for the next token a sequence could be preempted before its first answer, and gain nothing.
    Without the watermark a prompt could be admitted only to be preempted by the next block that a running sequence
    needs. With nothing running, what fits may start.
    """

    manager: KVCacheManager
    table: SequenceTable
    watermark_blocks: int
    name: str = "capacity"

    def begin_pass(self) -> None:
        """Nothing to note."""

    def allows(self, candidate: Candidate) -> bool:
        """Compare the blocks needed with those available once the hit is held."""
        hit = candidate.hit
        sequence = candidate.sequence
        num_tokens = min(len(sequence.token_ids) + 1, sequence.max_num_tokens - 1)
        needed = self.manager.num_blocks_for(num_tokens) - len(hit.block_ids)
        available = self.manager.num_available_blocks - hit.num_evictable_blocks
        watermark = self.watermark_blocks if self.table.num_active else 0
        # Prompts that run but are not computed in full will still take blocks: those count as taken.
        return needed + watermark + self._promised_blocks() <= available

    def _promised_blocks(self) -> int:
        slots = self.table.active_slots
        return int(self.manager.missing_blocks(slots, self.table.num_tokens[slots]).sum())


@dataclass(frozen=True, slots=True)
class PredictedPeakFits:
    """The blocks that all running sequences and the new one will need at the worst moment are there.

    Sequences end one after the other, each after its expected remaining output. Just before the i-th of them
    ends, all that end later have grown by as much as it has; the peak is the largest sum over these moments (the
    admission of LightLLM, ASPLOS '25, "Past-Future Scheduler", §3).
    """

    manager: KVCacheManager
    table: SequenceTable
    name: str = "predicted_peak"

    def begin_pass(self) -> None:
        """Nothing to note."""

    def allows(self, candidate: Candidate) -> bool:
        """Compare the peak with the pool; alone, what fits may start."""
        return not self.table.num_active or self.peak_blocks(candidate) <= self.manager.num_blocks

    def peak_blocks(self, candidate: Candidate) -> int:
        """Return the largest number of blocks held at any expected end, the candidate included."""
        table, slots = self.table, self.table.active_slots
        sequence, expected = candidate.sequence, candidate.expected_output_tokens
        num_known = len(sequence.token_ids)
        num_output = num_known - sequence.num_prompt_tokens
        # As for those that run: one that was preempted past its expectation goes on as long as it has.
        left = expected - num_output if expected > num_output else num_output
        remaining = np.append(table.remaining_output_tokens(slots), min(left, sequence.max_num_tokens - num_known))
        num_tokens = np.append(table.num_tokens[slots], num_known)
        order = np.argsort(-remaining, kind="stable")
        remaining, num_tokens = remaining[order], num_tokens[order]
        # Row i holds so much when the i-th longest ends: its own and all longer ones have grown by its remainder.
        ranks = np.arange(1, len(order) + 1)
        block_size = self.manager.block_size
        # A sequence wastes half a block on average; the last block of each is counted whole.
        peak = int(((np.cumsum(num_tokens) + ranks * remaining) // block_size + ranks).max())
        # Blocks that several sequences share are held once.
        num_listed = int(table.num_blocks[slots].sum()) + len(candidate.hit.block_ids)
        held_after = self.manager.block_counts.num_held + candidate.hit.num_evictable_blocks
        return peak - max(0, num_listed - held_after)


@dataclass(slots=True)
class BatchIsForming:
    """Static batching: requests join only while nothing has been computed; for measurements only."""

    table: SequenceTable
    name: str = "static_batch"
    _is_forming: bool = False

    def begin_pass(self) -> None:
        """A batch can begin when the last one has ended to its longest sequence."""
        self._is_forming = not self.table.num_active

    def allows(self, candidate: Candidate) -> bool:
        """Say whether the batch is still forming."""
        return self._is_forming


def first_refusal(rules: SequenceOf[AdmissionRule], candidate: Candidate) -> str | None:
    """Return the name of the first rule that makes the candidate wait, or None."""
    for rule in rules:
        if not rule.allows(candidate):
            return rule.name
    return None
