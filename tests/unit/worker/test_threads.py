from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.worker.layers.threads import OperatorThreads


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_small_operators_of_a_small_step_run_on_one_thread() -> None:
    threads = OperatorThreads(3)

    threads.begin_step(64, 10_000)
    outside = torch.get_num_threads()
    with threads:
        inside = torch.get_num_threads()

    assert (outside, inside, torch.get_num_threads()) == (1, 3, 1)
    threads.end_step()
    assert torch.get_num_threads() == 3


def test_a_large_step_shares_everything() -> None:
    threads = OperatorThreads(3)

    threads.begin_step(2_000, 2_000)

    assert torch.get_num_threads() == 3


def test_a_fault_in_a_large_operator_does_not_outlive_the_step() -> None:
    threads = OperatorThreads(3)
    threads.begin_step(64, 64)

    with pytest.raises(ZeroDivisionError), threads:
        raise ZeroDivisionError

    assert torch.get_num_threads() == 1


def test_a_tiny_step_does_not_wake_a_single_helper() -> None:
    threads = OperatorThreads(2)

    threads.begin_step(8, 1_000)
    with threads:
        inside = torch.get_num_threads()
    threads.begin_step(8, 10_000)
    with threads:
        inside_with_long_context = torch.get_num_threads()

    assert (inside, inside_with_long_context) == (1, 2)
