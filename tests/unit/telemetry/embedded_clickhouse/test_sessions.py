"""Sessions: one call at a time, an end for each, never too many."""

from __future__ import annotations

import pytest

from services.telemetry.embedded_clickhouse.errors import ClickHouseError
from services.telemetry.embedded_clickhouse.sessions import MAX_SESSIONS, SessionRef, Sessions


class FakeConnection:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ref(session_id: str, timeout_seconds: float = 60.0, must_exist: bool = False) -> SessionRef:
    return SessionRef(session_id, timeout_seconds, must_exist)


def test_a_session_keeps_its_connection_until_it_has_been_idle_too_long() -> None:
    clock = FakeClock()
    sessions = Sessions(clock)
    with sessions.use(ref("a"), FakeConnection) as first:
        pass
    clock.now = 59.0
    with sessions.use(ref("a"), FakeConnection) as second:
        pass
    clock.now = 59.0 + 60.0

    with sessions.use(ref("a"), FakeConnection) as third:
        pass

    assert second is first
    assert third is not first
    assert first.is_closed


def test_a_second_call_in_a_session_is_refused_while_the_first_runs() -> None:
    sessions = Sessions(FakeClock())

    with (
        sessions.use(ref("a"), FakeConnection),
        pytest.raises(ClickHouseError, match="locked") as caught,
        sessions.use(ref("a"), FakeConnection),
    ):
        pass

    assert caught.value.code == 373


def test_a_session_that_must_exist_is_not_begun() -> None:
    sessions = Sessions(FakeClock())

    with (
        pytest.raises(ClickHouseError, match="not found") as caught,
        sessions.use(ref("a", must_exist=True), FakeConnection),
    ):
        pass

    assert caught.value.code == 372


def test_the_session_that_would_end_first_makes_room_for_a_new_one() -> None:
    clock = FakeClock()
    sessions = Sessions(clock)
    connections = []
    for number in range(MAX_SESSIONS + 1):
        clock.now += 0.1
        with sessions.use(ref(str(number)), FakeConnection) as connection:
            connections.append(connection)

    assert [connection.is_closed for connection in connections] == [True, *[False] * MAX_SESSIONS]
    sessions.close()
    assert all(connection.is_closed for connection in connections)
