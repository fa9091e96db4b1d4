from __future__ import annotations

import math

import numpy as np

from services.worker.exact_math import exp_of, log_mass_of, log_of, masses_of


def test_exponentials_are_near_the_real_ones() -> None:
    scores = -np.linspace(0.0, 60.0, 200_001).astype(np.float32)

    relative = exp_of(scores) / np.exp(scores.astype(np.float64)) - 1

    # The product with log2(e) is rounded in fp32: half a unit in its last place times ln 2.
    assert np.abs(relative).max() < 5e-6
    assert exp_of(np.array([0.0, -0.0], dtype=np.float32)).tolist() == [1.0, 1.0]


def test_what_is_far_below_has_no_mass() -> None:
    masses = masses_of(exp_of(np.array([-math.inf, -3e38, -80.0, 0.0], dtype=np.float32)))

    assert masses.tolist() == [0, 0, 0, 2**40]


def test_logarithms_are_near_the_real_ones() -> None:
    values = np.exp(np.random.default_rng(1).uniform(-40, 40, 100_000))
    values = np.concatenate((values, [1.0, 1 - 2.0**-41, 2.0**-41, 0.5]))

    error = np.abs(log_of(values) - np.log(values)) / np.maximum(np.abs(np.log(values)), 1e-30)

    assert error[np.log(values) != 0].max() < 1e-15 * 4
    assert log_of(np.array([1.0])).tolist() == [0.0]


def test_the_mass_of_equal_tokens_is_their_number() -> None:
    assert math.isclose(log_mass_of(1000 << 40), math.log(1000), rel_tol=1e-15)
