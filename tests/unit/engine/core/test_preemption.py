"""Who gives up its blocks: lowest priority, then least work lost, then last in line; never the first in line."""

from __future__ import annotations

import numpy as np

from services.engine.core.preemption import choose_victim
from services.engine.core.sequence_table import SequenceTable
from tests.fakes.requests import make_sequence


def _table(*rows: tuple[int, int, int]) -> SequenceTable:
    """Take a row for each handle, priority and number of computed tokens."""
    table = SequenceTable(max_num_seqs=8, max_model_len=64, block_size=16)
    for handle, priority, num_computed in rows:
        slot = table.take(make_sequence(handle, [1], priority=priority), expected_output_tokens=1)
        table.num_computed_tokens[slot] = num_computed
    return table


def _victim(table: SequenceTable, *handles: int) -> int | None:
    """Return the handle of the victim among all, or among some."""
    slots = table.active_slots
    if handles:
        slots = slots[np.isin(table.handles[slots], handles)]
    slot = choose_victim(table, slots)
    return None if slot is None else int(table.handles[slot])


def test_least_work_is_lost() -> None:
    assert _victim(_table((1, 0, 50), (2, 0, 10), (3, 0, 30))) == 2


def test_among_equals_the_last_in_line_goes() -> None:
    assert _victim(_table((2, 0, 10), (3, 0, 10), (1, 0, 10))) == 3


def test_the_lowest_priority_goes_whatever_it_has_computed() -> None:
    assert _victim(_table((1, 0, 1), (2, -1, 60), (3, 1, 1))) == 2


def test_the_first_in_line_never_goes() -> None:
    assert _victim(_table((1, 0, 1), (2, 0, 60))) == 2
    assert _victim(_table((1, 0, 1), (2, 0, 60)), 1) is None
    # Priority makes it first, though it came last and has computed least.
    assert _victim(_table((1, 0, 60), (2, 5, 1))) == 1


def test_only_candidates_go() -> None:
    assert _victim(_table((1, 0, 50), (2, 0, 10), (3, 0, 30)), 1, 3) == 3


def test_one_alone_stays() -> None:
    assert _victim(_table((1, 0, 50))) is None
