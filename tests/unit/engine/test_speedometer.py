"""Rates come from measured steps only."""

from __future__ import annotations

from services.engine.speedometer import Speedometer


def test_rates_are_unknown_until_a_step_was_measured() -> None:
    speed = Speedometer()

    assert speed.prefill_tokens_per_second is None
    assert speed.decode_step_seconds is None


def test_steps_with_prompts_and_without_are_told_apart() -> None:
    speed = Speedometer()

    speed.note_step(num_tokens=200, num_sequences=2, step_seconds=0.1)
    speed.note_step(num_tokens=8, num_sequences=8, step_seconds=0.02)

    assert speed.prefill_tokens_per_second == 2000
    assert speed.decode_step_seconds == 0.02


def test_the_mean_follows_a_change_but_not_at_once() -> None:
    speed = Speedometer()
    speed.note_step(num_tokens=4, num_sequences=4, step_seconds=0.01)

    speed.note_step(num_tokens=4, num_sequences=4, step_seconds=0.03)
    after_one = speed.decode_step_seconds
    for _ in range(100):
        speed.note_step(num_tokens=4, num_sequences=4, step_seconds=0.03)

    assert after_one is not None
    assert 0.01 < after_one < 0.02
    assert speed.decode_step_seconds is not None
    assert abs(speed.decode_step_seconds - 0.03) < 1e-5


def test_a_step_without_a_duration_changes_nothing() -> None:
    speed = Speedometer()

    speed.note_step(num_tokens=4, num_sequences=4, step_seconds=0.0)

    assert speed.decode_step_seconds is None
