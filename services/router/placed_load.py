"""What this router has placed on one engine. Pure.

A pick is counted before it is dispatched, so that the next pick sees it; otherwise all requests of a burst would
land on the engine that looked best before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

# A request of one gateway's stream.
PlacementKey = NewType("PlacementKey", tuple[int, str])


@dataclass(frozen=True, slots=True)
class _Unseen:
    num_tokens: int
    placed_at: float


class PlacedLoad:
    """Requests placed on an engine, and which of them its load report cannot contain yet.

    A report is taken to contain what was placed at least ``report_lag_seconds`` before it came: the way of a
    request from the pick over the gateway into the engine and of the report back takes that long. Where it takes
    longer the report tells of fewer requests than were placed, and then the latest are those that are missing. For
    a short time a request may be counted twice.
    """

    def __init__(self, report_lag_seconds: float) -> None:
        self._report_lag_seconds = report_lag_seconds
        self._placed: set[PlacementKey] = set()
        # Of these the ones whose prefill is not over.
        self._unstarted: set[PlacementKey] = set()
        # In the order of placement.
        self._unseen: dict[PlacementKey, _Unseen] = {}
        self.num_unseen_tokens = 0

    @property
    def num_placed(self) -> int:
        """Return the requests placed and not finished."""
        return len(self._placed)

    @property
    def num_unseen(self) -> int:
        """Return the requests placed and not yet part of a report."""
        return len(self._unseen)

    def place(self, key: PlacementKey, num_tokens: int, now: float) -> None:
        """Count a request with the prompt tokens that the engine has to compute for it."""
        assert key not in self._placed, f"{key} is placed already"
        self._placed.add(key)
        self._unstarted.add(key)
        self._unseen[key] = _Unseen(num_tokens, now)
        self.num_unseen_tokens += num_tokens

    def start(self, key: PlacementKey) -> None:
        """Take off a request's tokens: its prefill is over."""
        self._unstarted.discard(key)
        self._see(key)

    def finish(self, key: PlacementKey) -> None:
        """Take off a request; one that is not counted changes nothing."""
        self.start(key)
        self._placed.discard(key)

    def on_report(self, now: float, num_requests: int) -> None:
        """Take off what a load report contains that came now and tells of so many requests, whoever placed them."""
        num_started = len(self._placed) - len(self._unstarted)
        num_seen = len(self._unstarted) - len(self._unseen)
        num_more = max(0, num_requests - num_started - num_seen)
        for key, unseen in list(self._unseen.items())[:num_more]:
            if unseen.placed_at > now - self._report_lag_seconds:
                break
            self._see(key)

    def _see(self, key: PlacementKey) -> None:
        unseen = self._unseen.pop(key, None)
        if unseen is not None:
            self.num_unseen_tokens -= unseen.num_tokens
