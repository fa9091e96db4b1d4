"""Whether a new token ends its sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.engine.core.request import TokenIds
from services.engine.core.sequence_table import SequenceTable, Slots


class FinishRules:
    """End tokens and stop token ids, over all sequences that got a token."""

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = np.array(sorted(eos_token_ids), np.uint32)

    def find_stopped(self, table: SequenceTable, slots: Slots, token_ids: TokenIds) -> npt.NDArray[np.bool_]:
        """Mark the sequences whose last token is an end token or a stop token id.

        Workers mask these tokens until the least output length is reached, so one that comes counts.
        """
        # There are few end tokens: to compare with each takes a tenth of the time of a search.
        is_end_token = (token_ids[:, np.newaxis] == self._eos_token_ids).any(axis=1)
        is_stopped: npt.NDArray[np.bool_] = is_end_token & ~table.ignores_eos[slots]
        for index in np.flatnonzero(table.has_stop_token_ids[slots]).tolist():
            stop_token_ids = table.sequence_at(int(slots[index])).request.stop_criteria.stop_token_ids
            if int(token_ids[index]) in stop_token_ids:
                is_stopped[index] = True
        return is_stopped
