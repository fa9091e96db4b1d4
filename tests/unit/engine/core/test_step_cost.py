"""The cost model finds what steps cost, predicts monotonically, and knows the inverse of its prediction."""

from __future__ import annotations

import random

import pytest

from services.engine.core.step_cost import StepCostModel, StepWork

_COSTS = (2e-3, 4e-5, 3e-8, 2e-9)


def _seconds(work: StepWork, costs: tuple[float, float, float, float] = _COSTS) -> float:
    per_step, per_token, per_read, per_pair = costs
    reads, pairs = per_read * work.decode_context_tokens, per_pair * work.prefill_pairs
    return per_step + per_token * work.num_tokens + reads + pairs


def _step(draw: random.Random) -> StepWork:
    """Draw a step as they come: some decodes, sometimes a chunk after some context."""
    num_decodes = draw.randint(1, 64)
    chunk = draw.choice((0, 0, draw.randint(2, 1_000)))
    before = draw.randint(0, 4_000)
    return StepWork(num_decodes + chunk, num_decodes * draw.randint(10, 3_000), chunk * before + chunk * chunk // 2)


def _fitted(
    num_steps: int = 400,
    noise: float = 0.0,
    seed: int = 1,
    costs: tuple[float, float, float, float] = _COSTS,
) -> StepCostModel:
    draw, model = random.Random(seed), StepCostModel()
    for _ in range(num_steps):
        work = _step(draw)
        model.note(work, _seconds(work, costs) * (1 + draw.gauss(0, noise)))
    return model


def test_needs_some_steps_before_it_predicts() -> None:
    assert [_fitted(number).is_fitted for number in (0, 7, 8)] == [False, False, True]


def test_finds_exact_costs() -> None:
    model, draw = _fitted(), random.Random(2)

    for work in (_step(draw) for _ in range(50)):
        assert model.predict_seconds(work) == pytest.approx(_seconds(work), rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_finds_costs_through_noise(seed: int) -> None:
    model, draw = _fitted(2_000, noise=0.05, seed=seed), random.Random(seed + 100)

    # About forty steps count, each off by a twentieth.
    for work in (_step(draw) for _ in range(50)):
        assert model.predict_seconds(work) == pytest.approx(_seconds(work), rel=0.15)


def test_follows_a_machine_that_becomes_slower() -> None:
    draw, model = random.Random(3), StepCostModel()
    slower = (4e-3, 8e-5, 6e-8, 4e-9)
    for costs in (_COSTS, slower):
        for _ in range(400):
            work = _step(draw)
            model.note(work, _seconds(work, costs))

    work = _step(draw)
    assert model.predict_seconds(work) == pytest.approx(_seconds(work, slower), rel=0.02)


def test_steps_that_are_all_alike_are_predicted_and_do_not_upset_what_comes_after() -> None:
    model, alike = StepCostModel(), StepWork(8, 8_000, 0)
    for _ in range(20_000):
        model.note(alike, _seconds(alike))
    assert model.predict_seconds(alike) == pytest.approx(_seconds(alike), rel=1e-6)

    draw = random.Random(4)
    for _ in range(400):
        work = _step(draw)
        model.note(work, _seconds(work))

    work = _step(draw)
    assert model.predict_seconds(work) == pytest.approx(_seconds(work), rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_more_work_never_takes_less(seed: int) -> None:
    # So much noise that some coefficients come out negative.
    model, draw = _fitted(60, noise=1.0, seed=seed), random.Random(seed)

    for _ in range(100):
        work = _step(draw)
        more = StepWork(
            work.num_tokens + draw.randint(0, 500),
            work.decode_context_tokens + draw.randint(0, 5_000),
            work.prefill_pairs + draw.randint(0, 50_000),
        )
        assert 0 <= model.predict_seconds(work) <= model.predict_seconds(more)


def _added_seconds(model: StepCostModel, chunk: int, num_computed: int) -> float:
    work = StepWork(chunk, 0, chunk * num_computed + chunk * chunk // 2)
    return model.predict_seconds(work) - model.predict_seconds(StepWork(0, 0, 0))


@pytest.mark.parametrize(
    "costs",
    [
        pytest.param(_COSTS, id="all"),
        pytest.param((2e-3, 4e-5, 3e-8, 0.0), id="pairs cost nothing"),
        pytest.param((2e-3, 0.0, 3e-8, 2e-8), id="tokens cost nothing but their pairs"),
        pytest.param((2e-3, 4e-5, 3e-8, 1e-16), id="pairs cost next to nothing"),
    ],
)
@pytest.mark.parametrize("num_computed", [0, 16, 5_000])
def test_the_longest_chunk_is_the_inverse_of_its_cost(
    costs: tuple[float, float, float, float], num_computed: int
) -> None:
    model = _fitted(costs=costs)
    for seconds in (1e-4, 1e-3, 1e-2, 0.1):
        chunk = model.max_chunk_tokens(seconds, num_computed_tokens=num_computed)

        # Pairs are whole numbers in a step and not in the formula; that is less than a token.
        assert _added_seconds(model, chunk, num_computed) <= seconds * (1 + 1e-9)
        assert _added_seconds(model, chunk + 2, num_computed) > seconds


@pytest.mark.parametrize("num_steps", [100, 1_000, 20_000])
def test_a_long_steady_decode_with_noise_upsets_nothing(num_steps: int) -> None:
    """The number of tokens never changes and the contexts grow: little says what costs what."""
    model, draw = StepCostModel(), random.Random(1)
    for number in range(num_steps):
        work = StepWork(8, 8_000 + 8 * (number % 500), 0)
        model.note(work, _seconds(work) * (1 + draw.gauss(0, 0.03)))
    assert model.predict_seconds(work) == pytest.approx(_seconds(work), rel=0.05)

    for _ in range(200):
        work = _step(draw)
        model.note(work, _seconds(work) * (1 + draw.gauss(0, 0.03)))
    for work in (_step(draw) for _ in range(50)):
        assert model.predict_seconds(work) == pytest.approx(_seconds(work), rel=0.1)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_is_no_tokens(seconds: float) -> None:
    assert _fitted().max_chunk_tokens(seconds, num_computed_tokens=0) == 0
