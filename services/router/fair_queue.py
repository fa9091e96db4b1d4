"""The queue of requests that have no place yet: bounded, by priority, fair between tenants. Pure.

Owns the order of what waits and when it has waited too long. It must not know engines, sockets or the clock.
Requests that have the same engines to choose from share a lane: when the first of a lane must wait, so must all
behind it, and no other lane is held up. Within a lane and a priority the tenant is next that was served least, so
that nobody waits behind all that another has sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from libs.kv import HashContract
from services.router.placed_load import PlacementKey
from services.router.policy.facts import EngineId, PlacementRequest
from services.router.policy.forecast import NEUTRAL_OUTPUT_TOKENS

# Tenants remembered beyond those that wait, before the ones that it makes no difference to forget are forgotten.
_MAX_SPARE_TENANTS: Final = 64


@dataclass(frozen=True, slots=True)
class LaneKey:
    """What decides which engines a request may go to."""

    model_name: str
    hash_contract: HashContract | None
    excluded_engine_ids: frozenset[EngineId]

    @classmethod
    def of(cls, request: PlacementRequest) -> LaneKey:
        """Return the lane of a request."""
        return cls(request.model_name, request.hash_contract, request.excluded_engine_ids)


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request in the queue."""

    key: PlacementKey
    request: PlacementRequest
    enqueued_at: float
    expires_at: float

    @property
    def lane_key(self) -> LaneKey:
        """Return the lane that it waits in."""
        return LaneKey.of(self.request)


class QueueFull(Exception):
    """The queue holds as many requests as it may."""


class _Line:
    """The requests of one lane and priority, those of each tenant in the order of arrival.

    Next is the tenant with the fewest tokens served while anybody stood here; one that comes back is not behind
    those who stand here, so that nobody saves up (the virtual token counter of Sheng et al., "Fairness in Serving
    Large Language Models", OSDI 2024, section 3, counted when a request is placed).
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[PlacementKey, WaitingRequest]] = {}
        self._served_tokens: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, waiting: WaitingRequest) -> None:
        tenant_id = waiting.request.tenant_id
        if tenant_id not in self._waiting:
            served_tokens = self._served_tokens.get(tenant_id, 0)
            self._served_tokens[tenant_id] = max(served_tokens, self._least_served_tokens())
        self._waiting.setdefault(tenant_id, {})[waiting.key] = waiting

    def head(self) -> WaitingRequest:
        """Return the request to serve first; among tenants that were served alike, who has waited longest."""
        heads = [(tenant_id, next(iter(own.values()))) for tenant_id, own in self._waiting.items()]
        return min(heads, key=lambda head: (self._served_tokens[head[0]], head[1].enqueued_at))[1]

    def remove(self, waiting: WaitingRequest, *, is_served: bool) -> None:
        request = waiting.request
        del self._waiting[request.tenant_id][waiting.key]
        if not self._waiting[request.tenant_id]:
            del self._waiting[request.tenant_id]
        if is_served:
            num_output_tokens = min(request.max_output_tokens, NEUTRAL_OUTPUT_TOKENS)
            self._served_tokens[request.tenant_id] += request.num_prompt_tokens + num_output_tokens
        if len(self._served_tokens) > 2 * len(self._waiting) + _MAX_SPARE_TENANTS:
            self._forget_tenants()

    def _least_served_tokens(self) -> int:
        return min((self._served_tokens[tenant_id] for tenant_id in self._waiting), default=0)

    def _forget_tenants(self) -> None:
        """Forget tenants of which nothing waits, first those that would begin with the least anyway."""
        least = self._least_served_tokens()
        ahead = {tenant: num for tenant, num in self._served_tokens.items() if num > least}
        kept = sorted(ahead.keys() - self._waiting.keys(), key=ahead.__getitem__)[-_MAX_SPARE_TENANTS:]
        self._served_tokens = {tenant: self._served_tokens[tenant] for tenant in (*self._waiting, *kept)}


class FairQueue:
    """Waiting requests in lanes; within a lane by priority, then the tenant that was served least."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._waiting: dict[PlacementKey, WaitingRequest] = {}
        # Arrival numbers order the first requests of different lanes.
        self._numbers: dict[PlacementKey, int] = {}
        self._num_arrivals = 0
        self._lanes: dict[LaneKey, dict[int, _Line]] = {}
        # Requests that were taken out stay in the heap until they come to its top.
        self._expiries: list[tuple[float, int, PlacementKey]] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: PlacementKey) -> bool:
        return key in self._waiting

    def has_lane(self, lane_key: LaneKey) -> bool:
        """Tell whether anything waits in a lane."""
        return lane_key in self._lanes

    def push(self, waiting: WaitingRequest) -> None:
        """Add a request.

        Raises:
            QueueFull: when there is no room; the queue is as before.
        """
        if len(self._waiting) >= self._max_requests:
            raise QueueFull
        assert waiting.key not in self._waiting, f"{waiting.key} waits already"
        self._num_arrivals += 1
        self._waiting[waiting.key] = waiting
        self._numbers[waiting.key] = self._num_arrivals
        self._lanes.setdefault(waiting.lane_key, {}).setdefault(waiting.request.priority, _Line()).push(waiting)
        self.num_prompt_tokens += waiting.request.num_prompt_tokens
        self._drop_stale_expiries()
        heapq.heappush(self._expiries, (waiting.expires_at, self._num_arrivals, waiting.key))

    def first(self, *, passing_over: Collection[LaneKey]) -> WaitingRequest | None:
        """Return the request to serve first, leaving out some lanes."""
        heads = [self._head(lane) for key, lane in self._lanes.items() if key not in passing_over]
        return min(heads, key=lambda head: (-head.request.priority, self._numbers[head.key]), default=None)

    def serve(self, key: PlacementKey) -> None:
        """Take out a request that has its place, and count it for its tenant."""
        waiting = self._take_out(key, is_served=True)
        assert waiting is not None, f"{key} does not wait"

    def remove(self, key: PlacementKey) -> WaitingRequest | None:
        """Take out a request that is not served; None when it does not wait."""
        return self._take_out(key, is_served=False)

    def next_expiry(self) -> float | None:
        """Return when the first request will have waited too long."""
        while self._expiries and not self._is_live(self._expiries[0]):
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def take_expired(self, now: float) -> list[WaitingRequest]:
        """Take out all requests that have waited too long, in the order of their expiry."""
        expired = []
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            _, _, key = heapq.heappop(self._expiries)
            waiting = self.remove(key)
            assert waiting is not None, f"{key} has an expiry and does not wait"
            expired.append(waiting)
        return expired

    def take_all(self) -> list[WaitingRequest]:
        """Take out all requests, in the order of arrival."""
        return [waiting for key in list(self._waiting) if (waiting := self.remove(key)) is not None]

    def _take_out(self, key: PlacementKey, *, is_served: bool) -> WaitingRequest | None:
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return None
        del self._numbers[key]
        lane = self._lanes[waiting.lane_key]
        lane[waiting.request.priority].remove(waiting, is_served=is_served)
        if not lane[waiting.request.priority]:
            del lane[waiting.request.priority]
        if not lane:
            del self._lanes[waiting.lane_key]
        self.num_prompt_tokens -= waiting.request.num_prompt_tokens
        return waiting

    def _head(self, lane: dict[int, _Line]) -> WaitingRequest:
        return lane[max(lane)].head()

    def _is_live(self, expiry: tuple[float, int, PlacementKey]) -> bool:
        _, number, key = expiry
        return self._numbers.get(key) == number

    def _drop_stale_expiries(self) -> None:
        # Keeps the heap within twice the bound of the queue.
        if len(self._expiries) >= 2 * self._max_requests:
            self._expiries = [expiry for expiry in self._expiries if self._is_live(expiry)]
            heapq.heapify(self._expiries)
