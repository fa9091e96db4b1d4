"""What a scheduling pass has decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.engine.core.kv_cache_manager import BlockCopy
from services.engine.core.scheduler_output import NewSequence
from services.engine.core.sequence_table import Slots
from services.engine.core.token_budget import TokenBudget

Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True)
class StepPlan:
    """What a pass has decided so far: parallel lists of arrays, joined at the end."""

    budget: TokenBudget
    slots: list[Slots] = field(default_factory=list)
    num_tokens: list[Counts] = field(default_factory=list)
    num_new_blocks: list[Counts] = field(default_factory=list)
    new_block_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)

    def add(
        self, slots: Slots, num_tokens: Counts, num_new_blocks: Counts, new_block_ids: npt.NDArray[np.int32]
    ) -> None:
        """Add sequences, the tokens each computes, and the blocks that each gets for them."""
        self.slots.append(slots)
        self.num_tokens.append(num_tokens)
        self.num_new_blocks.append(num_new_blocks)
        self.new_block_ids.append(new_block_ids)
