"""Filters, forecasts, scorers and the picker, each by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from services.router.config import RouterConfig
from services.router.placement import make_policy
from services.router.policy.facts import Candidate, EngineFacts, EngineState, Forecast
from services.router.policy.filters import HasRoom, Shortage, filter_engines
from services.router.policy.forecast import NeutralLoad, UnmeasuredRates, forecast, seconds_until_room
from services.router.policy.pickers import HighestScorePicker
from services.router.policy.scorers import PredictedWait, PrefixMatch, score_candidates
from tests.unit.router.builders import CONTRACT, facts, identity, load, request

UNMEASURED = UnmeasuredRates(prefill_tokens_per_second=1000.0, decode_step_seconds=0.03)
FILTERS = make_policy(RouterConfig()).filters

# Filters.


def test_admits_a_ready_engine_that_has_not_reported_yet() -> None:
    result = filter_engines(FILTERS, [facts()], request())

    assert [engine.engine_id for engine in result.engines] == ["engine-0"]
    assert result.shortage is None


@pytest.mark.parametrize(
    ("engine", "shortage"),
    [
        (facts(engine=identity(model_name="other")), Shortage.MODEL_NOT_SERVED),
        (facts(is_watched=False), Shortage.NO_ENGINE),
        (facts(is_current=False), Shortage.NO_ENGINE),
        (facts(state=EngineState.STARTING), Shortage.NO_ENGINE),
        (facts(state=EngineState.DRAINING), Shortage.NO_ENGINE),
        (facts(engine=identity(is_loaded=False)), Shortage.NO_ENGINE),
        (facts("excluded"), Shortage.NO_ENGINE),
        (
            facts(engine=identity(hash_contract=dataclasses.replace(CONTRACT, block_size=32))),
            Shortage.CONTRACT_DIFFERS,
        ),
        (
            facts(engine=identity(hash_contract=dataclasses.replace(CONTRACT, tokenizer_digest=b"x" * 32))),
            Shortage.CONTRACT_DIFFERS,
        ),
        (facts(engine_load=load(num_pending=100_000)), Shortage.NO_ROOM),
        (facts(num_unseen_tokens=100_000), Shortage.NO_ROOM),
        (facts(engine_load=load(num_running=64, num_waiting=16)), Shortage.NO_ROOM),
    ],
)
def test_says_what_is_short_when_the_last_engine_is_dropped(engine: EngineFacts, shortage: Shortage) -> None:
    result = filter_engines(FILTERS, [engine], request(excluded=["excluded"]))

    assert result.engines == ()
    assert result.shortage is shortage


def test_a_prompt_needs_room_for_one_output_token() -> None:
    assert filter_engines(FILTERS, [facts()], request(num_prompt_tokens=8191)).shortage is None
    assert filter_engines(FILTERS, [facts()], request(num_prompt_tokens=8192)).shortage is Shortage.PROMPT_TOO_LONG


def test_room_is_about_what_waits_not_about_the_length_of_the_request() -> None:
    room = HasRoom(max_waiting_steps=1.0, max_requests_ratio=1.25)
    engine = identity(max_num_batched_tokens=512)

    assert room.admits(facts(engine=engine, engine_load=load(num_pending=511)), request(num_prompt_tokens=8000))
    assert not room.admits(facts(engine=engine, engine_load=load(num_pending=512)), request(num_prompt_tokens=1))


# Forecasts.


def wait_of(engine: EngineFacts, *, peers: Sequence[EngineFacts] = (), num_cached: int = 0) -> float:
    neutral = NeutralLoad.of([engine, *peers], UNMEASURED)
    return forecast(engine, request(num_prompt_tokens=1000), num_cached, neutral).wait_seconds


def test_predicts_seconds_from_what_waits_what_was_placed_and_what_is_not_cached() -> None:
    engine = facts(engine_load=load(num_pending=3000, rate=2000.0), num_unseen_tokens=500)

    assert wait_of(engine, num_cached=400) == pytest.approx((3000 + 500 + 1000 - 400) / 2000)


def test_running_requests_share_the_steps() -> None:
    engine = identity(max_num_batched_tokens=512)
    idle = facts(engine=engine, engine_load=load(rate=1000.0, decode_step_seconds=0.05))
    busy = facts(engine=engine, engine_load=load(rate=1000.0, decode_step_seconds=0.05, num_running=4))

    # 1000 tokens take two steps.
    assert wait_of(busy) - wait_of(idle) == pytest.approx(2 * 0.05)


def test_all_seats_taken_means_waiting_for_one() -> None:
    engine = identity(max_num_seqs=4)
    with_seat = facts(engine=engine, engine_load=load(num_running=3))
    without_seat = facts(engine=engine, engine_load=load(num_running=4))

    assert wait_of(without_seat) > wait_of(with_seat)


def test_unknown_load_is_the_mean_of_the_others_not_zero() -> None:
    """RTR-05."""
    idle, busy = facts("a", engine_load=load()), facts("b", engine_load=load(num_pending=4000))
    unknown = facts("c")

    wait = wait_of(unknown, peers=[idle, busy])

    assert wait_of(idle, peers=[busy]) < wait < wait_of(busy, peers=[idle])
    assert wait == pytest.approx((2000 + 1000) / 1000)


def test_an_unmeasured_rate_is_the_mean_of_the_others() -> None:
    unmeasured = facts("a", engine_load=load())
    peers = [facts("b", engine_load=load(rate=400.0)), facts("c", engine_load=load(rate=600.0))]

    assert wait_of(unmeasured, peers=peers) == pytest.approx(1000 / 500)


def test_room_comes_when_engines_have_worked_off_the_queue() -> None:
    engines = [facts("a", engine_load=load(num_pending=500, rate=1000.0)), facts("b", engine_load=load(rate=500.0))]

    seconds = seconds_until_room(2500, engines, NeutralLoad.of(engines, UNMEASURED))

    assert seconds == pytest.approx((2500 + 500) / 1500)


# Scorers and picker.


def candidate(name: str, wait_seconds: float, num_cached: int = 0, num_placed: int = 0) -> Candidate:
    return Candidate(facts(name, num_placed=num_placed), Forecast(wait_seconds, num_cached))


def pick(*candidates: Candidate, picker: HighestScorePicker | None = None) -> str:
    scorers = (PredictedWait(weight=1.0, tolerance_seconds=0.05), PrefixMatch(weight=0.1))
    scored = score_candidates(scorers, candidates, request(num_prompt_tokens=1000))
    assert all(0 <= item.score <= 1 for item in scored)
    assert all(item.score == pytest.approx(sum(share.score for share in item.shares)) for item in scored)
    return (picker or HighestScorePicker()).pick(scored).candidate.engine.engine_id


def test_the_shortest_wait_wins() -> None:
    assert pick(candidate("a", 2.0), candidate("b", 1.0), candidate("c", 3.0)) == "b"


def test_a_cached_prefix_wins_at_equal_waits() -> None:
    assert pick(candidate("a", 1.0), candidate("b", 1.0, num_cached=500)) == "b"


def test_a_cached_prefix_is_worth_a_tenth_of_the_wait_and_no_more() -> None:
    assert pick(candidate("short", 1.0), candidate("cached", 1.1, num_cached=1000)) == "cached"
    assert pick(candidate("short", 1.0), candidate("cached", 1.2, num_cached=1000)) == "short"


def test_equals_go_to_the_fewest_placed() -> None:
    assert pick(candidate("a", 1.0, num_placed=2), candidate("b", 1.0, num_placed=1)) == "b"


def test_equals_in_all_take_turns() -> None:
    picker = HighestScorePicker()
    equals = [candidate(name, 1.0) for name in "cab"]

    assert [pick(*equals, picker=picker) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
