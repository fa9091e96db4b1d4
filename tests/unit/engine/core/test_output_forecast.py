"""How long outputs are expected to be: as long as the tenant's have been, and never longer than the limit."""

from __future__ import annotations

import random

from services.engine.core import output_forecast
from services.engine.core.output_forecast import OutputForecast


def _forecast(**lengths: list[int]) -> OutputForecast:
    forecast = OutputForecast()
    for tenant_id, outputs in lengths.items():
        for length in outputs:
            forecast.note(tenant_id, length)
    return forecast


def test_before_anything_is_known_the_limit_is_expected() -> None:
    assert _forecast(red=[5, 5, 5]).expected_tokens("red", 400) == 400


def test_equal_outputs_are_expected_again() -> None:
    assert _forecast(red=[5] * 4).expected_tokens("red", 400) == 5


def test_the_limit_bounds_what_is_expected() -> None:
    assert _forecast(red=[50] * 10).expected_tokens("red", 7) == 7


def test_at_least_one_token_is_expected() -> None:
    assert _forecast(red=[0] * 10).expected_tokens("red", 7) == 1


def test_tenants_are_told_apart() -> None:
    forecast = _forecast(red=[10] * 20, blue=[200] * 20)

    assert forecast.expected_tokens("red", 400) == 10
    assert forecast.expected_tokens("blue", 400) == 200


def test_a_tenant_that_is_not_known_well_is_an_average_one() -> None:
    forecast = _forecast(red=[20] * 20, blue=[300] * 3)

    expected = forecast.expected_tokens("blue", 400)

    assert expected == forecast.expected_tokens("nobody", 400)
    assert 20 < expected < 300


def test_spread_adds_a_margin() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(50, 150) for _ in range(500)]

    expected = _forecast(red=lengths).expected_tokens("red", 1_000)

    # The mean is 100 and the mean deviation 25; both move with the newest ten or so.
    assert 100 < expected < 160
    assert 0.6 < sum(length <= expected for length in lengths) / len(lengths) <= 1


def test_follows_a_tenant_whose_outputs_become_longer() -> None:
    forecast = _forecast(red=[10] * 200 + [100] * 60)

    assert 95 <= forecast.expected_tokens("red", 1_000) <= 110


def test_remembers_only_the_tenants_that_were_seen_last() -> None:
    forecast = OutputForecast()
    for number in range(output_forecast._MAX_TENANTS + 500):
        forecast.note(f"t{number}", 3)

    assert len(forecast._by_tenant) == output_forecast._MAX_TENANTS
    assert "t0" not in forecast._by_tenant
