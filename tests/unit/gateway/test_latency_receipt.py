"""The waterfall adds up, whatever is marked; and what the gateway makes of engines' words."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.engine_times import MAX_LATE_STEPS, FirstTokenReport, Journey, TryTimes
from services.gateway.latency_receipt import LatencyReceipt, Segment, Waterfall, nanos, server_timing

_MILLISECOND = 1_000_000

_durations = st.integers(0, 10**10)
_marks = st.lists(st.tuples(st.sampled_from(Segment), _durations, st.sampled_from(("lap", "skip", "add"))))
# RFC: name;dur=number, comma-separated (https://www.w3.org/TR/server-timing/, section 3).
_SERVER_TIMING_ENTRY = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+);dur=(\d+\.\d{3})")


@given(_marks, st.integers(0, 10**15), _durations)
def test_segments_and_what_is_left_over_add_up_to_the_wall_time(
    marks: list[tuple[Segment, int, str]], start_ns: int, rest_ns: int
) -> None:
    waterfall, now_ns, attributed_ns = Waterfall(start_ns), start_ns, 0
    for segment, duration_ns, how in marks:
        if how == "add":
            waterfall.add(segment, duration_ns)
        else:
            now_ns += duration_ns
            waterfall.lap(segment, now_ns) if how == "lap" else waterfall.skip(now_ns)
        attributed_ns += 0 if how == "skip" else duration_ns
    wall_ns = now_ns + rest_ns - start_ns

    receipt = LatencyReceipt(wall_ns, waterfall.segments(), absent={})
    shown = receipt.as_json()

    assert receipt.unattributed_ns == wall_ns - attributed_ns
    assert sum(shown["segments_us"].values()) + shown["unattributed_us"] == shown["wall_us"] == wall_ns // 1_000
    assert list(shown["segments_us"]) == [segment.value for segment in Segment]


@given(_marks)
def test_laps_alone_leave_nothing_over(marks: list[tuple[Segment, int, str]]) -> None:
    waterfall, now_ns = Waterfall(0), 0
    for segment, duration_ns, _ in marks:
        now_ns += duration_ns
        waterfall.lap(segment, now_ns)

    assert LatencyReceipt(now_ns, waterfall.segments(), absent={}).unattributed_ns == 0


def test_a_mark_before_the_last_one_takes_nothing_away() -> None:
    waterfall = Waterfall(0)
    waterfall.lap(Segment.AUTH, 10)
    waterfall.lap(Segment.DECODE, 5)
    waterfall.lap(Segment.FORMAT, 12)

    assert waterfall.segments() == {Segment.AUTH: 10, Segment.DECODE: 0, Segment.FORMAT: 2}


@given(st.dictionaries(st.sampled_from(Segment), st.integers(1, 10**12)))
def test_server_timing_parses_and_says_milliseconds(segments: dict[Segment, int]) -> None:
    value = server_timing(segments)

    entries = [_SERVER_TIMING_ENTRY.fullmatch(entry) for entry in value.split(", ")] if value else []
    assert all(entries)
    told = {entry[1]: float(entry[2]) for entry in entries if entry}
    assert told == {segment.value: duration_ns // 1_000 / 1_000 for segment, duration_ns in segments.items()}


def _try(*, submitted_ns: int = 0) -> TryTimes:
    return TryTimes(submitted_ns, stall_bound_ns=100 * _MILLISECOND)


def test_the_wire_is_the_round_trip_of_the_acceptance_less_what_the_engine_took_for_it() -> None:
    times = _try(submitted_ns=1_000 * _MILLISECOND)
    times.accept(1_005 * _MILLISECOND, 0.002)
    # 41 ms between the two messages for the engine, 41 and 3 for the gateway.
    times.first_tokens[0] = FirstTokenReport(0.012, 0.030, 0, {}, 0.001, 0.041)
    times.arrive(0, step_id=1, now_ns=1_049 * _MILLISECOND)

    segments = Journey(placement_ns=7, retry_ns=8, current=times).segments(until_ns=0)

    assert segments == {
        Segment.ROUTER_QUEUE: 7,
        Segment.RETRIES: 8,
        Segment.WIRE: 3 * _MILLISECOND,
        Segment.ENGINE_QUEUE: 12 * _MILLISECOND,
        Segment.PREFILL: 30 * _MILLISECOND,
        Segment.PUBLISH: 1 * _MILLISECOND,
        Segment.DELIVERY: 3 * _MILLISECOND,
    }


def test_an_acceptance_that_came_late_makes_no_wire_longer_than_it_was() -> None:
    times = _try()
    times.accept(30 * _MILLISECOND, 0.002)
    times.first_tokens[0] = FirstTokenReport(0.012, 0.030, 0, {}, 0.001, 0.041)
    times.arrive(0, step_id=1, now_ns=45 * _MILLISECOND)

    segments = times.segments(until_ns=0)

    # The engine had it for 43 ms of these 45.
    assert (segments[Segment.WIRE], segments[Segment.DELIVERY]) == (2 * _MILLISECOND, 0)


def test_an_engine_that_told_nothing_has_the_time_as_the_gateway_saw_it() -> None:
    lost = _try(submitted_ns=100)
    lost.accept(150, None)

    assert lost.segments(until_ns=900) == {Segment.ENGINE: 800}


def test_the_choice_whose_token_came_first_is_the_one_that_counts() -> None:
    times = _try()
    times.accept(0, 0.0)
    times.first_tokens[0] = FirstTokenReport(0.5, 0.5, 0, {})
    times.first_tokens[1] = FirstTokenReport(0.1, 0.2, 0, {})
    times.arrive(1, step_id=1, now_ns=300 * _MILLISECOND)
    times.arrive(0, step_id=2, now_ns=1_000 * _MILLISECOND)

    assert times.segments(until_ns=0)[Segment.ENGINE_QUEUE] == nanos(0.1)


def test_late_steps_are_those_beyond_the_bound_by_choice() -> None:
    times = _try()
    for choice_index, step_id, millisecond in ((0, 1, 0), (1, 1, 0), (0, 2, 100), (1, 3, 150), (0, 4, 201)):
        times.arrive(choice_index, step_id, millisecond * _MILLISECOND)

    assert [(late.choice_index, late.step_id) for late in times.late_steps] == [(1, 3), (0, 4)]
    assert times.is_late
    times.take()
    assert not times.is_late


def test_keeps_the_first_late_steps_and_counts_all() -> None:
    times = _try()
    for step_id in range(MAX_LATE_STEPS + 10):
        times.arrive(0, step_id, step_id * 200 * _MILLISECOND)

    assert len(times.late_steps) == MAX_LATE_STEPS
    assert times.num_late_steps == MAX_LATE_STEPS + 9


def test_the_gap_over_a_loss_is_measured_from_the_lost_engines_last_token() -> None:
    lost, next_try = _try(), _try(submitted_ns=900 * _MILLISECOND)
    lost.arrive(0, step_id=7, now_ns=100 * _MILLISECOND)
    # That it failed is no token.
    lost.fail(0, step_id=8, now_ns=400 * _MILLISECOND)
    next_try.go_on_from(lost)
    for step_id, millisecond in ((1, 1_100), (2, 1_300)):
        next_try.arrive(0, step_id, millisecond * _MILLISECOND)

    gaps = [(late.gap_ns // _MILLISECOND, late.is_after_loss) for late in next_try.late_steps]
    assert gaps == [(1_000, True), (200, False)]
    assert lost.late_steps == []


def test_losses_before_the_reader_has_a_token_are_one_interruption() -> None:
    first, refused, resumed = _try(), _try(), _try()
    journey = Journey()
    journey.begin_try(first)
    first.arrive(0, step_id=1, now_ns=10)
    journey.lose(20)
    journey.begin_try(refused)
    journey.read()
    journey.lose(30)
    journey.begin_try(resumed)
    assert journey.is_resuming
    resumed.arrive(0, step_id=1, now_ns=90)

    journey.read()

    assert not journey.is_resuming
    assert [(one.lost_ns, one.first_arrival_ns) for one in journey.resumptions] == [(20, 90)]
    assert journey.tries == [first, resumed]
    # The way to the first token is over.
    assert journey.current is first
