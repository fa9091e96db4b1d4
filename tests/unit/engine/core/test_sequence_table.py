"""Rows of running sequences."""

from __future__ import annotations

import pytest

from services.engine.core.request import Sequence
from services.engine.core.sequence_table import NO_HANDLE, SequenceTable
from tests.fakes.requests import make_request, make_sequence


def _table() -> SequenceTable:
    return SequenceTable(max_num_seqs=3, max_model_len=32, block_size=16)


def _take(table: SequenceTable, sequence: Sequence, expected_output_tokens: int = 1) -> int:
    return table.take(sequence, expected_output_tokens=expected_output_tokens)


def test_a_row_that_is_taken_again_remembers_nothing() -> None:
    table = _table()
    slot = _take(table, make_sequence(1, range(20)))
    table.num_computed_tokens[slot] = table.work_done[slot] = 20
    table.num_blocks[slot] = 2
    table.num_committed_blocks[slot] = 1
    table.has_first_token[slot] = True
    table.num_tokens[slot] = 21
    table.num_unconfirmed_tokens[slot] = 1
    table.give_back(slot)

    again = _take(table, make_sequence(2, [7, 8]))

    assert again == slot
    assert table.known_token_ids(slot).tolist() == [7, 8]
    assert table.blocks(slot) == []
    for column in (
        table.num_computed_tokens,
        table.work_done,
        table.num_committed_blocks,
        table.num_unconfirmed_tokens,
        table.has_first_token,
    ):
        assert column[slot] == 0


def test_a_sequence_takes_its_tokens_and_work_with_it() -> None:
    table = _table()
    sequence = make_sequence(1, [1, 2])
    slot = _take(table, sequence)
    table.token_ids[slot, 2] = 3
    table.num_tokens[slot] = 3
    table.work_done[slot] = 2

    table.give_back(slot)
    table.token_ids[slot] = 99

    assert sequence.token_ids.tolist() == [1, 2, 3]
    assert sequence.num_computed_tokens_total == 2
    assert sequence.slot is None
    assert table.handles[slot] == NO_HANDLE


def test_a_token_that_is_being_sampled_is_not_known() -> None:
    table = _table()
    sequence = make_sequence(1, [1, 2])
    slot = _take(table, sequence)
    table.num_tokens[slot] = 3
    table.num_unconfirmed_tokens[slot] = 1

    assert table.known_token_ids(slot).tolist() == [1, 2]
    table.give_back(slot)
    assert sequence.token_ids.tolist() == [1, 2]


def test_a_row_has_another_term_whenever_it_changes_hands() -> None:
    table = _table()
    sequence = make_sequence(1, [1])
    terms = set()
    for _ in range(3):
        slot = _take(table, sequence)
        terms.add(int(table.terms[slot]))
        table.give_back(slot)
        terms.add(int(table.terms[slot]))

    assert len(terms) == 6


@pytest.mark.parametrize(
    ("num_output", "expected", "remaining"),
    [
        pytest.param(0, 10, 10, id="at the start"),
        pytest.param(4, 10, 6, id="on the way"),
        pytest.param(9, 10, 1, id="at its last expected token"),
        pytest.param(10, 10, 10, id="past what was expected it goes on as long again"),
        pytest.param(14, 10, 6, id="past what was expected, but not past the limit"),
        pytest.param(20, 10, 0, id="at the limit"),
    ],
)
def test_remaining_output(num_output: int, expected: int, remaining: int) -> None:
    table = _table()
    request = make_request("r", [1, 2], max_output_tokens=20)
    slot = _take(table, make_sequence(1, [1, 2], request=request), expected)
    table.num_tokens[slot] += num_output

    assert table.remaining_output_tokens(table.active_slots).tolist() == [remaining]


def test_active_slots_follow_takes_and_returns() -> None:
    table = _table()
    slots = [_take(table, make_sequence(handle, [1])) for handle in (1, 2, 3)]
    assert not table.has_free_slot

    table.give_back(slots[1])

    assert table.active_slots.tolist() == [slots[0], slots[2]]
    assert table.num_active == 2
    assert table.has_free_slot


def test_line_is_by_place_then_arrival() -> None:
    table = _table()
    for handle, priority in ((3, 0), (1, 0), (2, 1)):
        _take(table, make_sequence(handle, [1], priority=priority))

    assert table.handles[table.in_line(table.active_slots)].tolist() == [2, 1, 3]


def test_an_empty_row_cannot_be_given_back() -> None:
    with pytest.raises(AssertionError, match="slot 1 is empty already"):
        _table().give_back(1)


def test_an_empty_row_has_no_sequence() -> None:
    with pytest.raises(AssertionError, match="slot 0 is empty"):
        _table().sequence_at(0)
