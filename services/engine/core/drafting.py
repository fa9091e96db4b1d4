"""Speculative decoding in the scheduler: which sequences compute drafts in a step, and what became of them.

A draft is a token that is computed before it is known. Workers accept it exactly when it is the token that they
choose in its place (Leviathan et al., ICML '23, for draws that are a function of the place: the acceptance is an
equality), so outputs do not depend on drafts. See docs/decisions/0015.

Owns who drafts, when, and what was sent and not answered. It must not know requests' limits beyond the table.
"""

from __future__ import annotations

import numpy as np

from libs.errors import InternalError
from services.engine.core.draft_proposer import DraftProposer
from services.engine.core.kv_cache_manager import KVCacheManager
from services.engine.core.request import TokenIds
from services.engine.core.scheduler_config import SpeculationConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepResult
from services.engine.core.sequence_table import SequenceTable, Slots
from services.engine.core.step_plan import Counts, Flags, StepPlan

# A sequence whose drafts fail computes so many tokens at most without any before it tries again.
MAX_PAUSE_TOKENS = 8


class Drafting:
    """Adds drafts to steps, by slot of the sequence table.

    To draft, the values of all tokens of a sequence must be known. So while somebody has drafted or could, one step
    is in flight instead of two, for all sequences alike: those that do not draft would otherwise fill every second
    step alone. A sequence whose drafts come to nothing goes on without for some tokens, twice as many each time.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        table: SequenceTable,
        manager: KVCacheManager,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._table = table
        self._manager = manager
        self._proposer = DraftProposer(config.min_ngram_tokens, config.max_ngram_tokens)
        self._eos_token_ids = frozenset(eos_token_ids)
        max_num_seqs = len(table.sequences)
        self._is_unanswered = np.zeros(max_num_seqs, np.bool_)
        # How long the last pause was, and how many tokens of it are left.
        self._pauses = np.zeros(max_num_seqs, np.int64)
        self._pauses_left = np.zeros(max_num_seqs, np.int64)

    def begin(self, slot: int) -> None:
        """Note that a sequence has taken a slot."""
        self._is_unanswered[slot] = False
        self._pauses[slot] = self._pauses_left[slot] = 0

    @property
    def awaits_answer(self) -> bool:
        """Whether the next step must wait for the one in flight: somebody has drafted, or could draft next."""
        slots = self._table.active_slots
        if self._is_unanswered[slots].any():
            return True
        if self._is_crowded:
            return False
        could_draft = (self._pauses_left[slots] == 0) & (self._table.num_unconfirmed_tokens[slots] > 0)
        # What follows the tokens known so far begins with a guess at the one that is being sampled.
        return any(len(self._propose(slot)) > 0 for slot in slots[could_draft].tolist())

    def add_drafts(self, plan: StepPlan, decodes: Slots) -> None:
        """Let sequences that compute one token compute drafts as well, as far as budget and blocks are left."""
        was_pausing = self._pauses_left[decodes] > 0
        self._pauses_left[decodes] -= was_pausing
        if self._is_crowded:
            return
        table = self._table
        ready = decodes[~was_pausing & (table.num_unconfirmed_tokens[decodes] == 0)]
        for slot in table.in_line(ready).tolist():
            num_computed = int(table.num_computed_tokens[slot]) + 1
            drafts = self._propose(slot)
            num_granted = plan.budget.grant_drafts(
                min(len(drafts), self._room_after(slot, num_computed)), num_computed_tokens=num_computed
            )
            if num_granted:
                self._is_unanswered[slot] = True
                self._add(plan, slot, drafts[:num_granted], num_computed + num_granted)
            elif len(drafts):
                # To wait for answers again would gain nothing while others use up the step.
                self._pause(slot)

    def take_answer(self, output: SchedulerOutput, is_answered: Flags, num_tokens: Counts) -> None:
        """Count the accepted drafts of the step's sequences that are ``is_answered`` ``[num_seqs]`` as computed.

        ``num_tokens`` ``[num_answered]`` is how many tokens each got: one more than it has accepted.
        """
        assert output.drafts is not None, "a step without drafts has none to count"
        table, slots = self._table, output.slots[is_answered]
        has_drafted = output.drafts.num_tokens[is_answered] > 0
        num_accepted = num_tokens - 1
        table.num_tokens[slots] += num_accepted
        table.num_computed_tokens[slots] += num_accepted
        self._is_unanswered[slots[has_drafted]] = False
        self._pauses[slots[num_accepted > 0]] = 0
        for slot in slots[has_drafted & (num_accepted == 0)].tolist():
            self._pause(slot)

    @property
    def _is_crowded(self) -> bool:
        """Whether so many sequences run that the worker has no time to spare."""
        return self._table.num_active > self._config.max_drafting_seqs

    def _propose(self, slot: int) -> TokenIds:
        """Return drafts short of an end token and of the last token that may come: these are sampled in any case.

        So only the last token of a step can end a sequence, and nothing ever comes behind it.
        """
        num_left = int(self._table.max_num_tokens[slot] - self._table.num_tokens[slot])
        num_wanted = min(self._config.num_draft_tokens, num_left - 1)
        drafts = self._proposer.propose(self._table.known_token_ids(slot), num_wanted)
        criteria = self._table.sequence_at(slot).request.stop_criteria
        end_token_ids = criteria.stop_token_ids | (frozenset() if criteria.ignore_eos else self._eos_token_ids)
        ends = np.flatnonzero(np.isin(drafts, list(end_token_ids)))
        return drafts[: ends[0]] if len(ends) else drafts

    def _room_after(self, slot: int, num_computed: int) -> int:
        """Return how many drafts find place in the blocks that the sequence has or could get."""
        num_blocks = int(self._table.num_blocks[slot]) + self._manager.num_available_blocks
        return num_blocks * self._manager.block_size - num_computed

    def _add(self, plan: StepPlan, slot: int, drafts: TokenIds, num_tokens: int) -> None:
        slots = np.array([slot])
        missing = self._manager.missing_blocks(slots, np.array([num_tokens]))
        # Blocks of drafts that are not accepted stay: the tokens that come instead will need them.
        plan.add_drafts(slot, drafts, self._manager.allocate(slots, missing))

    def _pause(self, slot: int) -> None:
        self._pauses[slot] = self._pauses_left[slot] = min(max(1, 2 * int(self._pauses[slot])), MAX_PAUSE_TOKENS)


def refuse_wrong_drafts(output: SchedulerOutput, result: StepResult) -> None:
    """Raise InternalError when a result has tokens that are neither drafts nor the one sampled after them."""
    if output.drafts is None:
        if len(result.token_ids) != len(result.slots):
            raise InternalError(
                f"Step {output.step_id} had no drafts, but gave {len(result.token_ids)} tokens to "
                f"{len(result.slots)} sequences."
            )
        return
    is_answered = np.isin(output.slots, result.slots)
    num_drafts, num_accepted = output.drafts.num_tokens[is_answered], result.num_tokens - 1
    if ((num_accepted < 0) | (num_accepted > num_drafts)).any():
        raise InternalError(
            f"Step {output.step_id} had {num_drafts.tolist()} drafts, but gave {result.num_tokens.tolist()} tokens."
        )
    accepted = result.token_ids[ranges(np.cumsum(result.num_tokens) - result.num_tokens, num_accepted)]
    first_drafts = np.cumsum(output.drafts.num_tokens) - output.drafts.num_tokens
    if not np.array_equal(accepted, output.drafts.token_ids[ranges(first_drafts[is_answered], num_accepted)]):
        raise InternalError(f"Step {output.step_id} accepted tokens that were not drafted.")


def ranges(firsts: Counts, counts: Counts) -> Counts:
    """Return ``counts[i]`` numbers from ``firsts[i]`` on, one range after the other."""
    begins = np.cumsum(counts) - counts
    numbers: Counts = np.arange(int(counts.sum())) + np.repeat(firsts - begins, counts)
    return numbers
