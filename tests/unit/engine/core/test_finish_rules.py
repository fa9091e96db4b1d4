"""When a new token ends its sequence."""

from __future__ import annotations

import numpy as np
import pytest

from services.engine.core.finish import FinishRules
from services.engine.core.sequence_table import SequenceTable
from tests.fakes.requests import make_request, make_sequence


def _table_with(token_ids: list[int], **criteria: object) -> tuple[SequenceTable, np.typing.NDArray[np.int64]]:
    """Return a table whose only row has just got the last of ``token_ids``; one of them is the prompt."""
    table = SequenceTable(max_num_seqs=2, max_model_len=32, block_size=16)
    request = make_request("r", token_ids[:1], **criteria)  # type: ignore[arg-type]  # Criteria pass through.
    return table, np.array([table.take(make_sequence(1, token_ids, request=request), expected_output_tokens=1)])


@pytest.mark.parametrize(
    ("token_id", "criteria", "is_stopped"),
    [
        pytest.param(9, {}, False, id="an ordinary token"),
        pytest.param(2, {}, True, id="an end token"),
        pytest.param(5, {}, True, id="the other end token"),
        pytest.param(2, {"ignore_eos": True}, False, id="an end token that is ignored"),
        pytest.param(9, {"stop_token_ids": frozenset({8, 9})}, True, id="a stop token id"),
        pytest.param(7, {"stop_token_ids": frozenset({8, 9})}, False, id="no stop token id"),
        pytest.param(9, {"stop_token_ids": frozenset({9}), "ignore_eos": True}, True, id="a stop id, ends ignored"),
        pytest.param(2, {"stop_token_ids": frozenset({2}), "ignore_eos": True}, True, id="an end token as stop id"),
    ],
)
def test_stop(token_id: int, criteria: dict[str, object], is_stopped: bool) -> None:
    table, slots = _table_with([1, token_id], **criteria)

    stopped = FinishRules((5, 2)).find_stopped(table, slots, np.array([token_id], np.uint32))

    assert stopped.tolist() == [is_stopped]


def test_a_model_without_end_tokens_never_stops_by_itself() -> None:
    table, slots = _table_with([1, 0])

    assert FinishRules(()).find_stopped(table, slots, np.array([0], np.uint32)).tolist() == [False]


def test_nobody_got_a_token() -> None:
    table, _ = _table_with([1, 2])
    nobody = np.empty(0, np.int64)

    assert FinishRules((2,)).find_stopped(table, nobody, np.empty(0, np.uint32)).tolist() == []
