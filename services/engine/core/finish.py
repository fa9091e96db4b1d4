"""Whether a new token ends its sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.engine.core.request import TokenIds
from services.engine.core.sequence_table import SequenceTable, Slots


class FinishRules:
    """End tokens and stop token ids, over all sequences that got a token."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def find_stopped(self, table: SequenceTable, slots: Slots, token_ids: TokenIds) -> npt.NDArray[np.bool_]:
        """Mark the sequences whose last token is an end token or a stop token id.

        Workers mask these tokens until the least output length is reached, so one that comes counts.
        """
        is_stopped = np.zeros(len(token_ids), np.bool_)
        # There are few end tokens: to compare with each is quicker than any search.
        for eos_token_id in self._eos_token_ids:
            is_stopped |= token_ids == eos_token_id
        is_stopped &= ~table.ignores_eos[slots]
        for index in np.flatnonzero(table.has_stop_token_ids[slots]).tolist():
            stop_token_ids = table.sequence_at(int(slots[index])).request.stop_criteria.stop_token_ids
            if int(token_ids[index]) in stop_token_ids:
                is_stopped[index] = True
        return is_stopped
