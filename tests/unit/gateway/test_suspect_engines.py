"""Suspects: for a time, until they serve, and within a bound."""

from __future__ import annotations

from services.gateway.suspect_engines import SuspectEngines


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_suspicion_lasts_from_the_last_failure_until_its_time_is_over() -> None:
    clock = Clock()
    suspects = SuspectEngines(10.0, clock)
    suspects.suspect("b")
    clock.now = 105.0
    suspects.suspect("a")
    clock.now = 106.0
    suspects.suspect("b")

    found = []
    for clock.now in (106.0, 115.0, 116.0):
        found.append(suspects.engine_ids)

    assert found == [{"a", "b"}, {"b"}, set()]


def test_an_engine_that_serves_is_trusted_at_once() -> None:
    suspects = SuspectEngines(10.0, Clock())
    suspects.suspect("a")
    suspects.trust("a")
    suspects.trust("never suspected")

    assert suspects.engine_ids == set()


def test_only_the_latest_are_remembered() -> None:
    suspects = SuspectEngines(10.0, Clock())
    for number in range(2_000):
        suspects.suspect(f"engine-{number}")

    assert len(suspects.engine_ids) == 1_024
    assert "engine-1999" in suspects.engine_ids
