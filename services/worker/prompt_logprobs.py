"""Log-probabilities of prompt tokens, some rows at a time.

Owns which rows of a batch are measured: those before a prompt's last token, of sequences that want them. It must
not know how logits are computed. A row says how likely the token after it was, so a chunk of a prompt gives as many
as it computes, and a prompt one less than it has tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.logprobs import TokenLogprobs
from services.worker.forward_pass import Forwarded
from services.worker.input_batch import FlatBatch, InputBatch
from services.worker.row_sampler import NO_LOGPROBS, RowSampler
from services.worker.step import IntArray, PromptLogprobs, SamplingParams

# Logits of so many rows exist at a time, however long a prompt is: enough to read the head's weights few times.
MAX_ROWS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredPrompts:
    """What was measured in a step, and which sequences could be; the others have logits that are not numbers."""

    logprobs: PromptLogprobs
    is_measured: NDArray[np.bool_]  # [num_seqs]; true where there was nothing to measure


class PromptScorer:
    """Measures the prompts of a batch; knows by slot who wants it."""

    def __init__(self, row_sampler: RowSampler, *, max_num_seqs: int) -> None:
        self._row_sampler = row_sampler
        self._num_alternatives = np.full(max_num_seqs, NO_LOGPROBS, dtype=np.int64)

    def add(self, slot: int, params: SamplingParams) -> None:
        """Note whether a new sequence wants its prompt measured."""
        wanted = params.num_prompt_logprobs
        self._num_alternatives[slot] = NO_LOGPROBS if wanted is None else wanted

    def measure(self, forwarded: Forwarded, batch: FlatBatch, known: InputBatch) -> MeasuredPrompts:
        """Measure the tokens after the computed rows, as far as they belong to prompts."""
        is_measured = np.ones(len(batch.slots), dtype=np.bool_)
        measured: list[tuple[int, int, TokenLogprobs]] = []
        for index in np.flatnonzero(self._num_alternatives[batch.slots] != NO_LOGPROBS).tolist():
            slot, first_row = int(batch.slots[index]), int(batch.first_rows[index])
            position = int(batch.positions[first_row]) + 1
            end = min(position + int(batch.num_queries[index]), known.num_prompt_tokens(slot))
            if position >= end:
                continue
            targets = known.token_ids_of(slot)[position:end].astype(np.int64)
            tokens = self._measure_rows(forwarded, first_row, targets, int(self._num_alternatives[slot]))
            if tokens is None:
                is_measured[index] = False
            else:
                measured.append((slot, position, tokens))
        return MeasuredPrompts(_joined(measured), is_measured)

    def _measure_rows(
        self, forwarded: Forwarded, first_row: int, targets: IntArray, num_alternatives: int
    ) -> TokenLogprobs | None:
        parts: list[TokenLogprobs] = []
        for first in range(0, len(targets), MAX_ROWS_AT_A_TIME):
            part = targets[first : first + MAX_ROWS_AT_A_TIME]
            logits = forwarded.row_logits(first_row + first + np.arange(len(part)))
            tokens = self._row_sampler.measure(logits, part, np.full(len(part), num_alternatives))
            if tokens is None:
                return None
            parts.append(tokens)
        return TokenLogprobs.joined(parts)


def _joined(measured: list[tuple[int, int, TokenLogprobs]]) -> PromptLogprobs:
    if not measured:
        return PromptLogprobs.none()
    return PromptLogprobs(
        slots=np.array([slot for slot, _, _ in measured], dtype=np.int64),
        positions=np.array([position for _, position, _ in measured], dtype=np.int64),
        num_tokens=np.array([len(tokens) for _, _, tokens in measured], dtype=np.int64),
        tokens=TokenLogprobs.joined([tokens for _, _, tokens in measured]),
    )
