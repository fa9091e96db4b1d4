"""Ranks meet in shared memory: sums, logits, bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from libs.errors import InternalError, WorkerLost
from services.worker.exchange import Exchange, ExchangeLayout
from tests.unit.worker.ranks import exchanges, on_all_ranks

LAYOUT = ExchangeLayout(num_ranks=3, max_num_tokens=40, max_head_rows=2, hidden_size=33, vocab_size=10)


def random_parts(seed: int, num_rounds: int) -> NDArray[np.float32]:
    shape = (num_rounds, LAYOUT.num_ranks, 40, 33)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_all_ranks_have_the_same_bits_of_every_sum(seed: int) -> None:
    parts = random_parts(seed, num_rounds=30)
    ranks = exchanges(LAYOUT)

    def add_all(rank: int) -> list[NDArray[np.float32]]:
        return [ranks[rank].add(parts[round_][rank]) for round_ in range(30)]

    for totals in on_all_ranks(3, add_all):
        for round_, total in enumerate(totals):
            np.testing.assert_array_equal(total, parts[round_][0] + parts[round_][1] + parts[round_][2])


def test_columns_of_all_ranks_make_whole_rows() -> None:
    ranks = exchanges(LAYOUT)
    rows = np.arange(50, dtype=np.float32).reshape(5, 10)
    firsts = (0, 4, 7, 10)

    def gather(rank: int) -> list[NDArray[np.float32]]:
        own = rows[:, firsts[rank] : firsts[rank + 1]]
        return [ranks[rank].gather_columns(own + index, firsts[rank]) for index in range(20)]

    for gathered in on_all_ranks(3, gather):
        for index, whole in enumerate(gathered):
            np.testing.assert_array_equal(whole, rows + index)


def test_counts_of_meetings_wrap_around() -> None:
    ranks = exchanges(LAYOUT)
    arrivals = ranks[0].memory[: 4 * 64].view(np.uint32).reshape(4, 16)[1:, 0]
    arrivals[:] = 2**32 - 3

    def meet_six_times(rank: int) -> None:
        for _ in range(6):
            ranks[rank].meet()

    on_all_ranks(3, meet_six_times)

    assert arrivals.tolist() == [3, 3, 3]


def test_a_rank_that_does_not_come_breaks_the_group_for_all() -> None:
    ranks = exchanges(LAYOUT, timeout_seconds=0.5)

    def meet_unless_last(rank: int) -> None:
        if rank != 2:
            with pytest.raises(WorkerLost, match="Rank 2 of 3 did not come"):
                ranks[rank].meet()

    on_all_ranks(3, meet_unless_last)

    with pytest.raises(WorkerLost, match="Rank 2 of 3 did not come"):
        ranks[2].meet()


def test_the_first_reason_stays() -> None:
    first, second, _ = exchanges(LAYOUT, timeout_seconds=0.05)
    with pytest.raises(WorkerLost, match="Rank 1 of 3"):
        first.meet()

    second.break_group()

    with pytest.raises(WorkerLost, match="Rank 1 of 3"):
        second.meet()


def test_batches_that_differ_are_noticed() -> None:
    ranks = exchanges(LAYOUT)

    def compute(rank: int) -> list[str]:
        verdicts = []
        for digests in ((5, 5, 5), (6, 6, 6), (7, 7, 8)):
            ranks[rank].begin_batch(digests[rank])
            ranks[rank].meet()
            try:
                ranks[rank].end_batch()
                verdicts.append("same")
            except InternalError:
                verdicts.append("different")
        return verdicts

    assert on_all_ranks(3, compute) == [["same", "same", "different"]] * 3


def test_what_is_so_on_all_ranks_is_agreed_on() -> None:
    ranks = exchanges(LAYOUT)
    answers = np.array([[True, True, False, False], [True, False, True, False], [True, True, True, False]])

    agreed = on_all_ranks(3, lambda rank: ranks[rank].agree(answers[rank]).tolist())

    assert agreed == [[True, False, False, False]] * 3


def test_time_spent_waiting_is_counted() -> None:
    ranks = exchanges(LAYOUT, timeout_seconds=0.05)

    with pytest.raises(WorkerLost):
        ranks[0].meet()

    assert ranks[0].wait_seconds >= 0.05


@pytest.mark.parametrize("call", ["add", "gather"])
def test_what_has_no_room_is_refused(call: str) -> None:
    exchange: Exchange = exchanges(LAYOUT)[0]
    too_much: Any = np.zeros((1_000, 33), dtype=np.float32)

    with pytest.raises(InternalError, match="less room"):
        exchange.add(too_much) if call == "add" else exchange.gather_columns(too_much, 0)
