"""Thirty seeded lives of a small engine: nothing is lost, every token is right, every block comes back."""

from __future__ import annotations

import pytest

from tests.sim.simulation import Outcome, simulate

_SEEDS = range(1, 31)


@pytest.fixture(scope="module")
def outcomes() -> dict[int, Outcome]:
    return {}


@pytest.mark.parametrize("seed", _SEEDS)
def test_seeded_life_ends_with_every_account_even(seed: int, outcomes: dict[int, Outcome]) -> None:
    try:
        outcomes[seed] = simulate(seed)
    except Exception as error:
        error.add_note(f"Replay: python -m tests.sim.simulation {seed}")
        raise


def test_the_seeds_cover_what_they_are_for(outcomes: dict[int, Outcome]) -> None:
    if len(outcomes) < len(_SEEDS):
        pytest.skip("needs the outcomes of all seeds: run the whole file")
    lives = outcomes.values()

    assert sum(life.num_preemptions for life in lives) > 100
    assert sum(life.num_evictions for life in lives) > 1_000
    assert sum(life.num_aborted_in_flight for life in lives) > 100
    assert sum(life.num_worker_losses for life in lives) > 10
    assert sum(life.num_refused for life in lives) > 10
    assert sum(life.num_cached_tokens for life in lives) > 10_000
    reasons = {reason for life in lives for reason in life.ends}
    assert reasons == {"stop", "length", "aborted", "DeadlineExceeded", "InvalidLogits", "WorkerLost"}


def test_the_same_seed_gives_the_same_life() -> None:
    assert simulate(4, num_requests=60) == simulate(4, num_requests=60)
