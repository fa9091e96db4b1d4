"""How much a step tells workers of the sequences that join it.

A message has a bound of 16 MiB, and many choices could join at once, each with a prompt as long as the model's
context and a grammar of hundreds of kilobytes. Owns that estimate and its bound.
"""

from __future__ import annotations

from typing import Final

from services.engine.core.request import Sequence

# Beyond one sequence, of which workers are always told.
MAX_BYTES: Final = 8 * 2**20
_MAX_BYTES_PER_TOKEN_ID: Final = 5


class JoiningMessage:
    """What one step tells of sequences that join it, in bytes at most."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def has_room_for(self, sequence: Sequence) -> bool:
        """Say whether workers can be told of one more sequence in this step; of one they always can."""
        return not self._num_bytes or self._num_bytes + _num_bytes_of(sequence) <= MAX_BYTES

    def add(self, sequence: Sequence) -> None:
        """Note that a sequence joins."""
        self._num_bytes += _num_bytes_of(sequence)


def _num_bytes_of(sequence: Sequence) -> int:
    return len(sequence.token_ids) * _MAX_BYTES_PER_TOKEN_ID + sequence.request.num_params_bytes
