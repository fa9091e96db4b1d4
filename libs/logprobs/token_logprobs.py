"""Log-probabilities of some tokens, each with the likeliest tokens in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """An entry for each token; natural logarithms, of the model's distribution as it was before any parameter.

    A token's rank is one more than the number of tokens that are likelier, so equals share it. Its alternatives are
    the likeliest tokens, the likeliest first and of equals the lowest id first; the token itself may be among them.
    """

    logprobs: FloatArray  # [num_tokens]
    ranks: IntArray  # [num_tokens]
    num_alternatives: IntArray  # [num_tokens]
    alternative_token_ids: IntArray  # [sum of num_alternatives]
    alternative_logprobs: FloatArray  # [sum of num_alternatives]

    def __len__(self) -> int:
        return len(self.logprobs)

    @classmethod
    def none(cls) -> TokenLogprobs:
        """Return those of no tokens."""
        floats, ints = np.empty(0, np.float32), np.empty(0, np.int64)
        return cls(floats, ints, ints, ints, floats)

    @classmethod
    def joined(cls, parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """Return the entries of all parts, one part after the other."""
        if not parts:
            return cls.none()
        return cls(
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.num_alternatives for part in parts]),
            np.concatenate([part.alternative_token_ids for part in parts]),
            np.concatenate([part.alternative_logprobs for part in parts]),
        )

    def take(self, is_taken: npt.NDArray[np.bool_]) -> TokenLogprobs:
        """Return the entries that ``is_taken`` ``[num_tokens]`` marks."""
        if is_taken.all():
            return self
        of_alternatives = np.repeat(is_taken, self.num_alternatives)
        return TokenLogprobs(
            self.logprobs[is_taken],
            self.ranks[is_taken],
            self.num_alternatives[is_taken],
            self.alternative_token_ids[of_alternatives],
            self.alternative_logprobs[of_alternatives],
        )

    def in_order(self, order: IntArray) -> TokenLogprobs:
        """Return the entries that ``order`` names, in that order."""
        counts = self.num_alternatives[order]
        firsts = (np.cumsum(self.num_alternatives) - self.num_alternatives)[order]
        begins = np.cumsum(counts) - counts
        alternatives = np.arange(int(counts.sum())) + np.repeat(firsts - begins, counts)
        return TokenLogprobs(
            self.logprobs[order],
            self.ranks[order],
            counts,
            self.alternative_token_ids[alternatives],
            self.alternative_logprobs[alternatives],
        )
