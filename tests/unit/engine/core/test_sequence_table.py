"""Rows of running sequences."""

from __future__ import annotations

import pytest

from services.engine.core.sequence_table import NO_HANDLE, SequenceTable
from tests.fakes.requests import make_sequence


def _table() -> SequenceTable:
    return SequenceTable(max_num_seqs=3, max_model_len=32, block_size=16)


def test_a_row_that_is_taken_again_remembers_nothing() -> None:
    table = _table()
    slot = table.take(make_sequence(1, range(20)))
    table.num_computed_tokens[slot] = table.work_done[slot] = 20
    table.num_blocks[slot] = 2
    table.num_committed_blocks[slot] = 1
    table.has_first_token[slot] = True
    table.give_back(slot)

    again = table.take(make_sequence(2, [7, 8]))

    assert again == slot
    assert table.known_token_ids(slot).tolist() == [7, 8]
    assert table.blocks(slot) == []
    for column in (table.num_computed_tokens, table.work_done, table.num_committed_blocks, table.has_first_token):
        assert column[slot] == 0


def test_a_sequence_takes_its_tokens_and_work_with_it() -> None:
    table = _table()
    sequence = make_sequence(1, [1, 2])
    slot = table.take(sequence)
    table.token_ids[slot, 2] = 3
    table.num_tokens[slot] = 3
    table.work_done[slot] = 2

    table.give_back(slot)
    table.token_ids[slot] = 99

    assert sequence.token_ids.tolist() == [1, 2, 3]
    assert sequence.num_computed_tokens_total == 2
    assert sequence.slot is None
    assert table.handles[slot] == NO_HANDLE


def test_active_slots_follow_takes_and_returns() -> None:
    table = _table()
    slots = [table.take(make_sequence(handle, [1])) for handle in (1, 2, 3)]
    assert not table.has_free_slot

    table.give_back(slots[1])

    assert table.active_slots.tolist() == [slots[0], slots[2]]
    assert table.num_active == 2
    assert table.has_free_slot


def test_line_is_by_priority_then_arrival() -> None:
    table = _table()
    for handle, priority in ((3, 0), (1, 0), (2, 1)):
        table.take(make_sequence(handle, [1], priority=priority))

    assert table.handles[table.in_line(table.active_slots)].tolist() == [2, 1, 3]


def test_an_empty_row_cannot_be_given_back() -> None:
    with pytest.raises(AssertionError, match="slot 1 is empty already"):
        _table().give_back(1)


def test_an_empty_row_has_no_sequence() -> None:
    with pytest.raises(AssertionError, match="slot 0 is empty"):
        _table().sequence_at(0)
