"""Rows of logits sampled in native code: a ``RowSampler`` that gives the reference's tokens.

Owns handing over arrays. It must not know how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from libs.logprobs import TokenLogprobs
from services.worker.kernels.cpu.extension import EditArrays, Extension, MeasuredArrays, NativeModel
from services.worker.row_sampler import NO_LOGPROBS, Logits, RowSettings, RowStatus, SampledRows
from services.worker.step import IntArray
from services.worker.token_mask import num_mask_words

_NO_IDS = np.empty(0, dtype=np.int64)
_NO_BIASES = np.empty(0, dtype=np.float32)
_NO_HISTORY = np.empty(0, dtype=np.int32)


class NativeRowSampler:
    """Divides rows among the threads of ``model``, or among its own when there is none."""

    def __init__(
        self,
        extension: Extension,
        *,
        vocab_size: int,
        num_threads: int,
        model: NativeModel | None = None,
        kernels: str = "",
    ) -> None:
        self._extension = extension
        self._vocab_size = vocab_size
        self._sampler = extension.NativeSampler(
            vocab_size=vocab_size, num_threads=num_threads, model=model, kernels=kernels
        )
        self._no_edits = self._pack_edits(RowSettings.of_nothing())

    def sample(self, logits: Logits, rows: RowSettings) -> SampledRows:
        """Choose a token for each row."""
        token_ids = np.zeros(len(logits), dtype=np.int64)
        statuses = np.zeros(len(logits), dtype=np.uint8)
        measured = _Measured(self._extension, self._vocab_size, rows.num_alternatives)
        self._sampler.sample(
            logits=logits,
            inverse_temperatures=rows.inverse_temperatures,
            top_k=rows.top_k,
            top_p=rows.top_p,
            least_scores=rows.least_scores,
            draw_keys=rows.draw_keys,
            edits=self._pack_edits(rows) if rows.edits else self._no_edits,
            measured=measured.arrays,
            token_ids=token_ids,
            statuses=statuses,
        )
        is_measured = (rows.num_alternatives != NO_LOGPROBS) & (statuses == RowStatus.SAMPLED)
        return SampledRows(token_ids, statuses, measured.of_rows(is_measured))

    def measure(self, logits: Logits, token_ids: IntArray, num_alternatives: IntArray) -> TokenLogprobs | None:
        """Return the log-probabilities of a token for each row."""
        is_finite = np.zeros(len(logits), dtype=np.uint8)
        measured = _Measured(self._extension, self._vocab_size, num_alternatives)
        self._sampler.measure(logits=logits, token_ids=token_ids, measured=measured.arrays, is_finite=is_finite)
        return measured.of_rows(is_finite.view(np.bool_)) if is_finite.all() else None

    def _pack_edits(self, rows: RowSettings) -> EditArrays:
        edits = list(rows.edits.values())
        masks = [mask for each in edits for mask in each.masks]
        # Only penalties ask what was seen before.
        histories = [_NO_HISTORY if each.penalties.are_neutral else each.history.token_ids for each in edits]
        return self._extension.EditArrays(
            rows=_counts(rows.edits),
            masks=np.stack(masks) if masks else np.empty((0, num_mask_words(self._vocab_size)), dtype=np.int32),
            mask_counts=_counts(len(each.masks) for each in edits),
            banned_ids=np.concatenate([_NO_IDS, *(each.banned_token_ids for each in edits)]),
            ban_counts=_counts(len(each.banned_token_ids) for each in edits),
            bias_ids=np.concatenate([_NO_IDS, *(each.bias.token_ids for each in edits)]),
            biases=np.concatenate([_NO_BIASES, *(each.bias.biases for each in edits)]),
            bias_counts=_counts(len(each.bias.token_ids) for each in edits),
            penalties=np.array(
                [(p.repetition, p.presence, p.frequency) for p in (each.penalties for each in edits)],
                dtype=np.float64,
            ).reshape(-1, 3),
            history=np.concatenate([_NO_HISTORY, *histories]),
            history_counts=_counts(len(history) for history in histories),
            num_prompt_tokens=_counts(each.history.num_prompt_tokens for each in edits),
        )


class _Measured:
    """Room for the log-probabilities of some rows."""

    def __init__(self, extension: Extension, vocab_size: int, num_alternatives: IntArray) -> None:
        self._counts = np.minimum(num_alternatives, vocab_size)
        num_rows, width = len(num_alternatives), max(int(self._counts.max(initial=0)), 0)
        self._logprobs = np.empty(num_rows, dtype=np.float32)
        self._ranks = np.empty(num_rows, dtype=np.int64)
        self._alternative_ids = np.empty((num_rows, width), dtype=np.int64)
        self._alternative_logprobs = np.empty((num_rows, width), dtype=np.float32)
        self.arrays: MeasuredArrays = extension.MeasuredArrays(
            num_alternatives=self._counts,
            logprobs=self._logprobs,
            ranks=self._ranks,
            alternative_ids=self._alternative_ids,
            alternative_logprobs=self._alternative_logprobs,
        )

    def of_rows(self, is_chosen: NDArray[np.bool_]) -> TokenLogprobs:
        """Return those of the chosen rows."""
        if not is_chosen.any():
            return TokenLogprobs.none()
        counts = self._counts[is_chosen]
        is_filled = np.arange(self._alternative_ids.shape[1]) < counts[:, None]
        return TokenLogprobs(
            self._logprobs[is_chosen],
            self._ranks[is_chosen],
            counts,
            self._alternative_ids[is_chosen][is_filled],
            self._alternative_logprobs[is_chosen][is_filled],
        )


def _counts(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)
