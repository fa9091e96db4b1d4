"""The restart policy under a clock of its own."""

from __future__ import annotations

import pytest

from services.supervisor.restart_policy import GiveUp, RestartAfter, RestartLimits, RestartPolicy

_KILLED = -9


def _ready_policy(limits: RestartLimits | None = None) -> RestartPolicy:
    policy = RestartPolicy(limits or RestartLimits())
    policy.on_started(0.0)
    policy.on_ready()
    return policy


def _delays(policy: RestartPolicy, lives_seconds: list[float]) -> list[float]:
    """Let the process live so long again and again; returns the delays before each restart."""
    now, delays = 0.0, []
    for life in lives_seconds:
        policy.on_started(now)
        policy.on_ready()
        now += life
        decision = policy.on_exit(_KILLED, now)
        assert isinstance(decision, RestartAfter)
        delays.append(decision.delay_seconds)
        now += decision.delay_seconds
    return delays


def test_doubles_the_delay_up_to_its_limit() -> None:
    delays = _delays(_ready_policy(), [0.0] * 8)

    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_starts_over_with_the_first_delay_after_a_long_life() -> None:
    delays = _delays(_ready_policy(), [0.0, 0.0, 9.9, 10.0, 0.0])

    assert delays == [0.1, 0.2, 0.4, 0.1, 0.2]


def test_gives_up_on_too_many_restarts_within_the_window() -> None:
    policy = _ready_policy(RestartLimits(max_restarts=3, window_seconds=60.0))
    for now in (0.0, 10.0, 20.0):
        assert isinstance(policy.on_exit(_KILLED, now), RestartAfter)

    decision = policy.on_exit(_KILLED, 60.0)

    assert decision == GiveUp("ended more than 3 times within 60 seconds (killed by signal 9)")


def test_forgets_restarts_that_are_older_than_the_window() -> None:
    policy = _ready_policy(RestartLimits(max_restarts=3, window_seconds=60.0))
    for now in (0.0, 10.0, 20.0):
        policy.on_exit(_KILLED, now)

    decision = policy.on_exit(_KILLED, 60.1)

    assert isinstance(decision, RestartAfter)


def test_the_default_limits_end_a_crash_loop_within_a_minute() -> None:
    policy, now = _ready_policy(), 0.0
    while isinstance(decision := policy.on_exit(1, now), RestartAfter):
        now += decision.delay_seconds
        policy.on_started(now)
        policy.on_ready()
        assert now < 60.0

    assert isinstance(decision, GiveUp)


def test_gives_up_at_once_on_a_refused_configuration() -> None:
    policy = RestartPolicy(RestartLimits())
    policy.on_started(0.0)

    assert policy.on_exit(2, 0.5) == GiveUp("refused its configuration (exit code 2)")


@pytest.mark.parametrize("exit_code", [1, 0, _KILLED])
def test_gives_up_on_the_third_end_before_it_was_ever_ready(exit_code: int) -> None:
    policy = RestartPolicy(RestartLimits())

    decisions = []
    for now in (0.0, 100.0, 200.0):
        policy.on_started(now)
        decisions.append(policy.on_exit(exit_code, now + 50.0))

    assert [type(decision) for decision in decisions] == [RestartAfter, RestartAfter, GiveUp]


def test_a_process_that_was_ready_once_is_restarted_whatever_its_exit_code() -> None:
    policy = _ready_policy()

    decisions = []
    for number, code in enumerate([2, 1, 1, 0, _KILLED], 1):
        decisions.append(policy.on_exit(code, 100.0 * number))
        policy.on_started(100.0 * number)

    assert all(isinstance(decision, RestartAfter) for decision in decisions)


def _fail_starts(policy: RestartPolicy, lives_seconds: list[float], now: float) -> list[RestartAfter]:
    """Let the process end after so long again and again, each time before it is ready."""
    decisions = []
    for life in lives_seconds:
        policy.on_started(now)
        now += life
        decision = policy.on_exit(_KILLED, now)
        assert isinstance(decision, RestartAfter)
        decisions.append(decision)
        now += decision.delay_seconds
    return decisions


def test_one_that_is_never_ready_again_waits_longer_each_time_however_long_it_takes_to_fail() -> None:
    """A worker that died at each load was started again every 8 seconds, for ever."""
    decisions = _fail_starts(_ready_policy(), [8.0, 30.0, 8.0, 500.0] * 4, now=10.0)

    delays = [decision.delay_seconds for decision in decisions]
    assert delays[:5] == [0.2, 0.4, 0.8, 1.6, 3.2]
    assert delays[9:] == [pytest.approx(102.4), *([120.0] * 6)]
    assert [decision.num_failed_starts for decision in decisions] == list(range(1, 17))


def test_once_it_is_ready_again_it_starts_over() -> None:
    policy = _ready_policy()
    _fail_starts(policy, [8.0] * 12, now=10.0)
    policy.on_started(5_000.0)
    policy.on_ready()

    decision = policy.on_exit(_KILLED, 5_050.0)

    assert decision == RestartAfter(0.1)


def test_the_delay_of_endless_failures_stays_a_number() -> None:
    decisions = _fail_starts(_ready_policy(), [1.0] * 2_000, now=10.0)

    assert decisions[-1] == RestartAfter(120.0, 2_000)
