"""A model that serves: its parts, and how a batch goes through them.

Owns the weights, the KV cache and the sampler of one rank. It must not know the wire or who owns a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.draft_verifier import sample_sequences
from services.worker.forward_pass import ForwardPass
from services.worker.grammar_matcher import prepare_all
from services.worker.input_batch import BatchLimits, FlatBatch, InputBatch
from services.worker.kv_cache import KVCache
from services.worker.prompt_logprobs import PromptScorer
from services.worker.rank_group import RankGroup
from services.worker.row_sampler import RowStatus
from services.worker.sampler import Sampler
from services.worker.step import (
    FailedSequence,
    IntArray,
    NewSequence,
    OutputLogprobs,
    SampledTokens,
    SequenceFailure,
)
from services.worker.token_mask import TokenMatcher
from services.worker.work_counter import WorkCounter

_NOT_NUMBERS = "The model gave logits that are not numbers."
_GRAMMAR_LATE = "The grammar was not compiled in time, because this server is busy. Please try again."
_NO_TOKEN_LEFT = (
    "No token may come next: the grammar, allowed_token_ids, bad_words and min_tokens leave none together. "
    "Loosen them."
)


class Matchers(Protocol):
    """Makes what follows the grammars of one model's sequences."""

    def matcher_of(self, sequence: NewSequence) -> TokenMatcher | None:
        """Return what follows a new sequence's grammar, after the output that it has; None without a grammar."""
        ...

    def close(self) -> None:
        """Give up what was prepared."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """What exists from loading on."""

    limits: BatchLimits
    model: ForwardPass
    cache: KVCache
    batch: InputBatch
    sampler: Sampler
    prompt_scorer: PromptScorer
    matchers: Matchers
    work: WorkCounter
    group: RankGroup

    def close(self) -> None:
        """Give up what others hold for this model."""
        self.matchers.close()
        self.group.leave()

    def admit(self, sequence: NewSequence) -> None:
        """Take a new sequence's sampling parameters; raises InvalidRequest for those that do not fit the model."""
        self.sampler.add(
            sequence.slot, sequence.sampling_params, sequence.choice_index, self.matchers.matcher_of(sequence)
        )
        self.prompt_scorer.add(sequence.slot, sequence.sampling_params)

    def compute(self, batch: FlatBatch) -> SampledTokens:
        """Run the forward pass and choose tokens for each sequence whose last known token was computed."""
        self.group.begin_batch(batch)
        forwarded = self.model.run(batch)
        self.group.end_batch()
        prompts = self.prompt_scorer.measure(forwarded, batch, self.batch)
        is_finite = forwarded.is_finite & prompts.is_measured
        failed = [] if is_finite.all() else self._fail_sequences(batch, ~is_finite)
        is_sampled = batch.is_sampled & is_finite
        late = self._fail_late(batch.slots[is_sampled])
        if late:
            failed += late
            is_sampled &= ~np.isin(batch.slots, [each.slot for each in late])
        slots = batch.slots[is_sampled]
        num_tokens = token_ids = np.empty(0, dtype=np.int64)
        logprobs = OutputLogprobs.none()
        if len(slots):
            sampled = sample_sequences(
                self.sampler, self.batch, forwarded.logits(is_sampled), slots, batch.num_drafts[is_sampled]
            )
            has_tokens = sampled.num_tokens > 0
            failed += [
                self._fail_row(slot, status)
                for slot, status in zip(
                    slots[~has_tokens].tolist(), sampled.statuses[~has_tokens].tolist(), strict=True
                )
            ]
            slots, num_tokens, token_ids = slots[has_tokens], sampled.num_tokens[has_tokens], sampled.token_ids
            slot_of_token = np.repeat(slots, num_tokens)
            logprobs = OutputLogprobs(slot_of_token[self.sampler.wants_logprobs(slot_of_token)], sampled.logprobs)
        self.batch.commit(batch, slots, num_tokens, token_ids)
        return SampledTokens(slots, num_tokens, token_ids, tuple(failed), logprobs, prompts.logprobs)

    def _fail_late(self, slots: IntArray) -> list[FailedSequence]:
        """Fail sequences whose grammar does not come in time, on whichever rank: all go on with the same ones."""
        waiting = self.sampler.unprepared(slots)
        if not waiting:
            return []
        is_prepared = self.group.agree(prepare_all([*waiting.values()]))
        return [
            self.batch.fail(slot, SequenceFailure.NOT_READY, _GRAMMAR_LATE)
            for slot, is_there in zip(waiting, is_prepared.tolist(), strict=True)
            if not is_there
        ]

    def _fail_row(self, slot: int, status: RowStatus) -> FailedSequence:
        if status == RowStatus.NO_TOKEN_LEFT:
            reason = self.sampler.matcher_failure(slot) or _NO_TOKEN_LEFT
            return self.batch.fail(slot, SequenceFailure.NO_TOKEN_LEFT, reason)
        return self.batch.fail(slot, SequenceFailure.INVALID_LOGITS, _NOT_NUMBERS)

    def _fail_sequences(self, batch: FlatBatch, is_failed: NDArray[np.bool_]) -> list[FailedSequence]:
        """Fail sequences whose hidden states are not finite, and take what they wrote out of the cache."""
        slots_written = batch.slot_mapping[batch.rows_of(is_failed)]
        self.cache.clear_slots(torch.from_numpy(slots_written))
        return [
            self.batch.fail(slot, SequenceFailure.INVALID_LOGITS, _NOT_NUMBERS)
            for slot in batch.slots[is_failed].tolist()
        ]
