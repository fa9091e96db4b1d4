"""Which tokens sequences get that have computed drafts: the drafts that are right, and the token after them.

A sequence's rows are sampled one after the other, each with the history that it has if all drafts before it are
accepted, until a draft is not what was sampled in its place. Since a draw is a function of its place (gumbel.py),
these are exactly the tokens that come one by one without drafts: penalties, bans, grammars and log-probabilities
see the same history. Owns that loop. It must not know how a row is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.logprobs import TokenLogprobs
from services.worker.input_batch import InputBatch
from services.worker.logits_processors import TokenHistory
from services.worker.row_sampler import Logits, SampledRows
from services.worker.sampler import Sampler
from services.worker.step import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequences:
    """``num_tokens[i]`` of ``token_ids`` for the i-th sequence; none where its first row could not be sampled.

    A row behind accepted drafts that could not be sampled is left to the next step, where it is a first row.
    """

    num_tokens: IntArray  # [num_seqs]
    token_ids: IntArray  # [sum of num_tokens]
    statuses: NDArray[np.uint8]  # [num_seqs]: the RowStatus of its first row
    logprobs: TokenLogprobs  # of the tokens of those sequences that want them, in order


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """The tokens of one place behind the known tokens."""

    sequences: IntArray
    token_ids: IntArray
    logprobs: TokenLogprobs


def sample_sequences(
    sampler: Sampler, known: InputBatch, logits: Logits, slots: IntArray, num_drafts: IntArray
) -> SampledSequences:
    """Sample the rows of ``slots``: ``logits`` has ``num_drafts[i] + 1`` rows for the i-th, one after the other."""
    first_rows = np.cumsum(num_drafts + 1) - (num_drafts + 1)
    going, rounds, statuses = np.arange(len(slots)), list[_Round](), np.empty(0, dtype=np.uint8)
    for place in range(int(num_drafts.max()) + 1):
        rows = first_rows[going] + place
        sampled = _sample_place(
            sampler, known, logits if len(rows) == len(logits) else logits[rows], slots[going], place
        )
        if place == 0:
            statuses = sampled.statuses
        going, token_ids = going[sampled.is_sampled], sampled.token_ids[sampled.is_sampled]
        rounds.append(_Round(going, token_ids, sampled.logprobs))
        is_draft_left = num_drafts[going] > place
        going, token_ids = going[is_draft_left], token_ids[is_draft_left]
        going = going[token_ids == known.draft_token_ids(slots[going], place)]
        if not len(going):
            break
    return _joined(rounds, statuses, sampler.wants_logprobs(slots))


def _sample_place(sampler: Sampler, known: InputBatch, logits: Logits, slots: IntArray, place: int) -> SampledRows:
    histories = {
        row: TokenHistory(known.token_ids_of(slot, place), known.num_prompt_tokens(slot))
        for row, slot in enumerate(slots.tolist())
        if sampler.needs_history(slot)
    }
    return sampler.sample(logits, slots, known.num_output_tokens(slots) + place, histories)


def _joined(
    rounds: list[_Round], statuses: NDArray[np.uint8], wants_logprobs: NDArray[np.bool_]
) -> SampledSequences:
    """Put the tokens of each sequence one after the other."""
    sequences = np.concatenate([each.sequences for each in rounds])
    token_ids = np.concatenate([each.token_ids for each in rounds])
    logprobs = TokenLogprobs.joined([each.logprobs for each in rounds])
    if len(rounds) > 1:
        token_ids = token_ids[np.argsort(sequences, kind="stable")]
        wanting = sequences[wants_logprobs[sequences]]
        logprobs = logprobs.in_order(np.argsort(wanting, kind="stable"))
    return SampledSequences(np.bincount(sequences, minlength=len(statuses)), token_ids, statuses, logprobs)
