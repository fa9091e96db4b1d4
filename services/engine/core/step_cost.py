"""How long a step will take, learned from how long steps took."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A step counts half as much as one forty steps later: speeds change with load, temperature and neighbours.
_FORGETTING = 0.983
_MIN_SAMPLES = 8
# Small beside any information: it settles the directions about which steps say nothing.
_RIDGE = 1e-6


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    Args:
        num_tokens: tokens that pass through the layers.
        decode_context_tokens: cached tokens that single-token rows read.
        prefill_pairs: pairs of token and context that prompt chunks attend over.
    """

    num_tokens: int
    decode_context_tokens: int
    prefill_pairs: int


class StepCostModel:
    """Least squares with forgetting over four features: a constant, tokens, decode reads, prefill pairs.

    (The linear model is the one that Sarathi-Serve, OSDI '24, §4.3 profiles offline.) Nothing costs less than
    nothing: a coefficient that noise makes negative is left out of the fit. Kept as normal equations, which stay
    sound however long steps are alike; a recursive covariance winds up then.
    """

    def __init__(self) -> None:
        self._information = np.zeros((4, 4))
        self._moment = np.zeros(4)
        # Features of one size make the equations well conditioned.
        self._scale = np.array([1.0, 1e-2, 1e-4, 1e-5])
        self._num_samples = 0
        self._fit: npt.NDArray[np.float64] | None = None

    @property
    def is_fitted(self) -> bool:
        """Whether enough steps were seen for predictions."""
        return self._num_samples >= _MIN_SAMPLES

    def note(self, work: StepWork, step_seconds: float) -> None:
        """Learn from a measured step."""
        features = self._features(work)
        self._information = _FORGETTING * self._information + np.outer(features, features)
        self._moment = _FORGETTING * self._moment + step_seconds * features
        self._num_samples += 1
        self._fit = None

    def predict_seconds(self, work: StepWork) -> float:
        """Predict a step's time."""
        return float(self._features(work) @ self._coefficients)

    def max_chunk_tokens(self, seconds: float, *, num_computed_tokens: int) -> int:
        """Return the longest prompt chunk, after so many computed tokens, that adds at most ``seconds``.

        A chunk of k tokens after s costs ``b·k + d·(k·s + k²/2)``.
        """
        _, per_token, _, per_pair = (self._coefficients * self._scale).tolist()
        linear = per_token + per_pair * num_computed_tokens
        if seconds <= 0 or linear + per_pair <= 0:
            return 0
        # This form of the root loses no digits when pairs cost next to nothing.
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * per_pair * seconds)))

    @property
    def _coefficients(self) -> npt.NDArray[np.float64]:
        """The fit, none below zero; made when it is asked for."""
        if self._fit is None:
            fit, used = np.zeros(4), [0, 1, 2, 3]
            while used:
                fit[:] = 0.0
                information = self._information[np.ix_(used, used)] + _RIDGE * np.eye(len(used))
                fit[used] = np.linalg.solve(information, self._moment[used])
                if fit.min() >= 0:
                    break
                used.remove(int(fit.argmin()))
            self._fit = np.maximum(fit, 0.0)
        return self._fit

    def _features(self, work: StepWork) -> npt.NDArray[np.float64]:
        raw = np.array([1.0, work.num_tokens, work.decode_context_tokens, work.prefill_pairs])
        scaled: npt.NDArray[np.float64] = raw * self._scale
        return scaled
