"""What a scheduling pass has decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.engine.core.joining_message import JoiningMessage
from services.engine.core.kv_cache_manager import BlockCopy
from services.engine.core.request import TokenIds
from services.engine.core.scheduler_output import NewSequence, StepDrafts
from services.engine.core.sequence_table import Slots
from services.engine.core.token_budget import TokenBudget

Counts: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(slots=True)
class StepPlan:
    """What a pass has decided so far: parallel lists of arrays, joined at the end.

    ``decodes`` are the sequences that compute one token, and come first; ``drafts`` what they compute behind it, by
    their place in the step. ``joining_message`` bounds what workers are told of ``new_sequences``.
    """

    budget: TokenBudget
    slots: list[Slots] = field(default_factory=list)
    num_tokens: list[Counts] = field(default_factory=list)
    num_new_blocks: list[Counts] = field(default_factory=list)
    new_block_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    joining_message: JoiningMessage = field(default_factory=JoiningMessage)
    block_copies: list[BlockCopy] = field(default_factory=list)
    decodes: Slots = field(default_factory=lambda: np.empty(0, np.int64))
    drafts: dict[int, TokenIds] = field(default_factory=dict)

    def add_decodes(self, slots: Slots, num_new_blocks: Counts, new_block_ids: npt.NDArray[np.int32]) -> None:
        """Add the sequences that compute one token, before all others."""
        assert not self.slots, "decodes come first"
        self.decodes = slots
        self.add(slots, np.ones(len(slots), np.int64), num_new_blocks, new_block_ids)

    def add(
        self, slots: Slots, num_tokens: Counts, num_new_blocks: Counts, new_block_ids: npt.NDArray[np.int32]
    ) -> None:
        """Add sequences, the tokens each computes, and the blocks that each gets for them."""
        self.slots.append(slots)
        self.num_tokens.append(num_tokens)
        self.num_new_blocks.append(num_new_blocks)
        self.new_block_ids.append(new_block_ids)

    def add_drafts(self, slot: int, token_ids: TokenIds, new_block_ids: npt.NDArray[np.int32]) -> None:
        """Let one of the decodes compute drafts as well, and give it the blocks that it lacks for them."""
        [index] = np.flatnonzero(self.decodes == slot).tolist()
        self.drafts[index] = token_ids
        self.num_tokens[0][index] += len(token_ids)
        self.num_new_blocks[0][index] += len(new_block_ids)
        end_of_its_blocks = int(self.num_new_blocks[0][: index + 1].sum()) - len(new_block_ids)
        self.new_block_ids[0] = np.insert(self.new_block_ids[0], end_of_its_blocks, new_block_ids)

    def joined_drafts(self, num_seqs: int) -> StepDrafts | None:
        """Return the drafts of the step's sequences."""
        if not self.drafts:
            return None
        num_tokens = np.zeros(num_seqs, np.int64)
        for index, token_ids in self.drafts.items():
            num_tokens[index] = len(token_ids)
        return StepDrafts(num_tokens, np.concatenate([self.drafts[index] for index in sorted(self.drafts)]))
