"""Seeded lives of a small engine: nothing is lost, every token is right, every block comes back."""

from __future__ import annotations

import pytest

from services.engine.core.scheduler_config import Admission, Batching, Layout
from tests.sim.simulation import Outcome, simulate

_SEEDS = range(1, 201)


@pytest.fixture(scope="module")
def outcomes() -> dict[int, Outcome]:
    return {}


@pytest.mark.parametrize("seed", _SEEDS)
def test_seeded_life_ends_with_every_account_even(seed: int, outcomes: dict[int, Outcome]) -> None:
    outcomes[seed] = simulate(seed)


def test_the_seeds_cover_what_they_are_for(outcomes: dict[int, Outcome]) -> None:
    if len(outcomes) < len(_SEEDS):
        pytest.skip("needs the outcomes of all seeds: run the whole file")
    lives = outcomes.values()

    assert sum(life.num_preemptions for life in lives) > 500
    assert sum(life.num_evictions for life in lives) > 10_000
    assert sum(life.num_copies for life in lives) > 2_000
    assert sum(life.num_sleeps for life in lives) > 2_000
    assert sum(life.num_discarded_tokens for life in lives) > 2_000
    assert sum(life.num_aborted_in_flight for life in lives) > 1_000
    assert sum(life.num_worker_losses for life in lives) > 100
    assert sum(life.num_refused for life in lives) > 1_000
    assert sum(life.num_cached_tokens for life in lives) > 100_000
    assert sum(life.num_accepted_drafts for life in lives) > 10_000
    assert sum(life.num_rejected_drafts for life in lives) > 10_000
    reasons = {reason for life in lives for reason in life.ends}
    assert reasons == {"stop", "length", "aborted", "DeadlineExceeded", "InvalidLogits", "WorkerLost"}
    configs = [life.config for life in lives]
    assert {config.max_steps_in_flight for config in configs} == {1, 2}
    assert {config.admission for config in configs} == set(Admission)
    assert {config.batching for config in configs} == set(Batching)
    assert {config.layout for config in configs} == set(Layout)


def test_the_same_seed_gives_the_same_life() -> None:
    assert simulate(4, num_requests=60) == simulate(4, num_requests=60)


def test_a_failing_life_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a fault")

    monkeypatch.setattr("tests.fakes.watched_scheduler.WatchedScheduler.check", fail)

    with pytest.raises(AssertionError) as failure:
        simulate(7, num_requests=20)

    assert failure.value.__notes__ == ["Replay: python -m tests.sim.simulation 7 --requests 20"]


def test_a_long_life_of_ten_thousand_requests() -> None:
    outcome = simulate(3, num_requests=10_000)

    assert sum(outcome.ends.values()) + outcome.num_refused >= 10_000
    assert outcome.config.max_steps_in_flight == 2
    assert min(outcome.num_preemptions, outcome.num_copies, outcome.num_sleeps, outcome.num_discarded_tokens) > 100
