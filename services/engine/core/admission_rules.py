"""Why a waiting request must wait: one small object for each reason."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from services.engine.core.kv_cache_manager import KVCacheManager, PrefixHit
from services.engine.core.request import Sequence
from services.engine.core.sequence_table import SequenceTable


class AdmissionRule(Protocol):
    """Judges whether the first in line may join the running set in this step."""

    @property
    def name(self) -> str:
        """Short reason for metrics and explanations."""
        ...

    def allows(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Say yes, or make it and all behind it wait."""
        ...


@dataclass(frozen=True, slots=True)
class WholePromptFits:
    """Blocks for all known tokens are available, with a watermark left for those that run.

    Without the watermark a prompt could be admitted only to be preempted by the next block that a running sequence
    needs. With nothing running, what fits may start.
    """

    manager: KVCacheManager
    table: SequenceTable
    watermark_blocks: int
    name: str = "capacity"

    def allows(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Compare the blocks needed with those available once the hit is held."""
        needed = self.manager.num_blocks_for(len(sequence.token_ids)) - len(hit.block_ids)
        available = self.manager.num_available_blocks - hit.num_evictable_blocks
        watermark = self.watermark_blocks if self.table.num_active else 0
        # Prompts that run but are not computed in full will still take blocks: those count as taken.
        return needed + watermark + self._promised_blocks() <= available

    def _promised_blocks(self) -> int:
        slots = self.table.active_slots
        return int(self.manager.missing_blocks(slots, self.table.num_tokens[slots]).sum())


def first_refusal(rules: SequenceOf[AdmissionRule], sequence: Sequence, hit: PrefixHit) -> str | None:
    """Return the name of the first rule that makes the sequence wait, or None."""
    for rule in rules:
        if not rule.allows(sequence, hit):
            return rule.name
    return None
