"""Who gives up its blocks when there are too few."""

from __future__ import annotations

import numpy as np

from services.engine.core.sequence_table import SequenceTable, Slots


def choose_victim(table: SequenceTable, candidates: Slots) -> int | None:
    """Return the slot among the candidates that loses least: lowest priority, least computed, last in line.

    The first in line of all is never chosen, so that somebody always makes progress and nothing starves.
    """
    first = table.in_line(table.active_slots)[0]
    slots = candidates[candidates != first]
    if not len(slots):
        return None
    keys = (-table.arrival_numbers[slots], table.num_computed_tokens[slots], table.priorities[slots])
    return int(slots[np.lexsort(keys)[0]])
