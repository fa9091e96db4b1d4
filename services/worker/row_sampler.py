"""The interface between the sampler and who computes it: rows of logits in, a token for each out.

Owns the arrays that cross it, and the reference in numpy: row by row, so that nothing of a row can depend on
another. The native one (kernels/cpu/sampler.py) gives the same tokens to the last bit of luck. Filters keep all
tokens from a threshold on, ties included, so the set that remains does not depend on an order among equals. They
apply in the order temperature, min_p, top_k, top_p, where top_p's mass is that of what the others left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from libs.logprobs import TokenLogprobs
from services.worker.exact_math import exp_of, log_mass_of, masses_of
from services.worker.gumbel import DrawKey, draw
from services.worker.logits_processors import LogitsEdits
from services.worker.step import IntArray

Logits = NDArray[np.float32]  # [num_rows, vocab_size]

NO_LOGPROBS = -1


class RowStatus(IntEnum):
    """What became of a row."""

    SAMPLED = 0
    NOT_NUMBERS = 1  # a logit was not a finite number, or became infinite by a bias or penalty
    NO_TOKEN_LEFT = 2  # all tokens were masked


@dataclass(frozen=True, slots=True, eq=False)
class RowSettings:
    """How to choose the token of each of a step's rows; arrays ``[num_rows]``."""

    inverse_temperatures: NDArray[np.float32]  # 0 takes the most likely token
    top_k: IntArray  # the size of the vocabulary keeps all
    top_p: NDArray[np.float64]  # 1 keeps all
    least_scores: NDArray[np.float32]  # the logarithms of min_p; negative infinity keeps all
    draw_keys: NDArray[np.uint32]  # [num_rows, 4]: low and high word of the seed, choice, position
    num_alternatives: IntArray  # for log-probabilities; NO_LOGPROBS wants none
    edits: Mapping[int, LogitsEdits]  # by row

    @classmethod
    def of_nothing(cls) -> RowSettings:
        """Return the settings of no rows."""
        floats, ints = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
        return cls(floats, ints, np.empty(0), floats, np.empty((0, 4), dtype=np.uint32), ints, {})


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """One token for each row, where the row could be sampled."""

    token_ids: IntArray  # [num_rows]; meaningless where not sampled
    statuses: NDArray[np.uint8]  # [num_rows]: a RowStatus
    logprobs: TokenLogprobs  # of the rows that were sampled and want them

    @property
    def is_sampled(self) -> NDArray[np.bool_]:
        """Whether the row has a token, ``[num_rows]``."""
        is_sampled: NDArray[np.bool_] = self.statuses == RowStatus.SAMPLED
        return is_sampled


class RowSampler(Protocol):
    """Chooses tokens and measures log-probabilities; leaves logits as they are."""

    def sample(self, logits: Logits, rows: RowSettings) -> SampledRows:
        """Choose a token for each row."""
        ...

    def measure(self, logits: Logits, token_ids: IntArray, num_alternatives: IntArray) -> TokenLogprobs | None:
        """Return the log-probabilities of a token for each row; None when a logit is not a finite number."""
        ...


class ReferenceRowSampler:
    """The rows by numpy."""

    def sample(self, logits: Logits, rows: RowSettings) -> SampledRows:
        """Choose a token for each row."""
        token_ids = np.zeros(len(logits), dtype=np.int64)
        statuses = np.zeros(len(logits), dtype=np.uint8)
        logprobs: list[TokenLogprobs] = []
        for row, values in enumerate(logits):
            chosen = _choose(values, rows, row)
            if isinstance(chosen, RowStatus):
                statuses[row] = chosen
                continue
            token_ids[row] = chosen
            if rows.num_alternatives[row] != NO_LOGPROBS:
                logprobs.append(_measure_row(values, chosen, int(rows.num_alternatives[row])))
        return SampledRows(token_ids, statuses, TokenLogprobs.joined(logprobs))

    def measure(self, logits: Logits, token_ids: IntArray, num_alternatives: IntArray) -> TokenLogprobs | None:
        """Return the log-probabilities of a token for each row."""
        if not np.isfinite(logits).all():
            return None
        return TokenLogprobs.joined(
            [
                _measure_row(values, token_id, count)
                for values, token_id, count in zip(
                    logits, token_ids.tolist(), num_alternatives.tolist(), strict=True
                )
            ]
        )


def _choose(logits: NDArray[np.float32], rows: RowSettings, row: int) -> int | RowStatus:
    """Return the token of one row ``[vocab_size]``, or why there is none."""
    if not np.isfinite(logits).all():
        return RowStatus.NOT_NUMBERS
    edits = rows.edits.get(row)
    if edits is not None:
        logits = logits.copy()
        with np.errstate(over="ignore", invalid="ignore"):
            edits.apply(logits)
    best_id = int(np.argmax(logits))
    greatest = logits[best_id]
    if not np.isfinite(greatest):
        return RowStatus.NO_TOKEN_LEFT if greatest == -math.inf else RowStatus.NOT_NUMBERS
    if rows.inverse_temperatures[row] == 0:
        return best_id
    with np.errstate(over="ignore"):
        scores = (logits - greatest) * rows.inverse_temperatures[row]
    key = DrawKey(*rows.draw_keys[row].tolist())
    return draw(scores, _kept(scores, rows, row), best_id, key)


def _kept(scores: NDArray[np.float32], rows: RowSettings, row: int) -> NDArray[np.bool_]:
    """Return what the filters leave of ``scores`` ``[vocab_size]``, of which the greatest is 0."""
    least = rows.least_scores[row]
    top_k, top_p = int(rows.top_k[row]), float(rows.top_p[row])
    if top_k < len(scores):
        least = max(least, np.partition(scores, len(scores) - top_k)[len(scores) - top_k])
    is_kept: NDArray[np.bool_] = scores >= least
    if top_p < 1.0:
        weights = exp_of(scores)
        ranked = -np.sort(-weights[is_kept])
        masses = np.cumsum(masses_of(ranked))
        needed = min(math.ceil(top_p * float(masses[-1])), int(masses[-1]))
        is_kept &= weights >= ranked[np.searchsorted(masses, needed)]
    return is_kept


def _measure_row(logits: NDArray[np.float32], token_id: int, num_alternatives: int) -> TokenLogprobs:
    scores = logits - logits.max()
    log_mass = log_mass_of(int(masses_of(exp_of(scores)).sum()))
    # Sorting by id keeps the lower one of equals first; what cannot be among the best is left out before.
    count = min(num_alternatives, len(logits))
    border = np.partition(logits, len(logits) - count)[len(logits) - count] if count else math.inf
    candidates = np.flatnonzero(logits >= border)
    best = candidates[np.argsort(-logits[candidates], kind="stable")][:count]
    return TokenLogprobs(
        logprobs=(scores[[token_id]].astype(np.float64) - log_mass).astype(np.float32),
        ranks=np.array([1 + np.count_nonzero(logits > logits[token_id])], dtype=np.int64),
        num_alternatives=np.array([count], dtype=np.int64),
        alternative_token_ids=best,
        alternative_logprobs=(scores[best].astype(np.float64) - log_mass).astype(np.float32),
    )
