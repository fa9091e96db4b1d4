"""ClickHouse sessions: settings and temporary tables that live from one call to the next.

Owns which connection belongs to which session and for how long. It must not know HTTP or SQL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from services.telemetry.embedded_clickhouse.errors import (
    SESSION_IS_LOCKED,
    SESSION_NOT_FOUND,
    TOO_MANY_QUERIES,
    ClickHouseError,
)

MAX_SESSIONS: Final = 64


@dataclass(frozen=True, slots=True)
class SessionRef:
    """A session as a call names it; `must_exist` refuses to begin a new one."""

    session_id: str
    timeout_seconds: float
    must_exist: bool


@dataclass(slots=True)
class _Session:
    connection: Any  # chdb has no types.
    expires_at: float
    is_busy: bool = field(default=False)


class Sessions:
    """At most `MAX_SESSIONS` sessions; one call at a time in each. Called from many threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}

    @contextmanager
    def use(self, ref: SessionRef, connect: Callable[[], Any]) -> Iterator[Any]:
        """Hold a session's connection for one call; begin the session if it is new."""
        with self._lock:
            session = self._take(ref, connect)
        try:
            yield session.connection
        finally:
            with self._lock:
                session.is_busy = False
                session.expires_at = self._clock() + ref.timeout_seconds

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            for session in self._sessions.values():
                session.connection.close()
            self._sessions.clear()

    def _take(self, ref: SessionRef, connect: Callable[[], Any]) -> _Session:
        self._end_expired()
        session = self._sessions.get(ref.session_id)
        if session is None:
            if ref.must_exist:
                raise ClickHouseError.of(SESSION_NOT_FOUND, f"Session {ref.session_id!r} not found")
            self._make_room()
            session = _Session(connect(), expires_at=0.0)
            self._sessions[ref.session_id] = session
        elif session.is_busy:
            raise ClickHouseError.of(SESSION_IS_LOCKED, f"Session {ref.session_id!r} is locked by a running query")
        session.is_busy = True
        return session

    def _end_expired(self) -> None:
        now = self._clock()
        expired = [name for name, one in self._sessions.items() if not one.is_busy and one.expires_at <= now]
        for name in expired:
            self._sessions.pop(name).connection.close()

    def _make_room(self) -> None:
        """End the idle session that would expire first when there are too many."""
        if len(self._sessions) < MAX_SESSIONS:
            return
        idle = {name: session.expires_at for name, session in self._sessions.items() if not session.is_busy}
        if not idle:
            raise ClickHouseError.of(TOO_MANY_QUERIES, f"All {MAX_SESSIONS} sessions are busy; try again later")
        self._sessions.pop(min(idle, key=idle.__getitem__)).connection.close()
