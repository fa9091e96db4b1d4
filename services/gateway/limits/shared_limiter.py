"""Limits that all gateways of a Redis share, and what happens while it is away.

Owns the conversation with Redis: one task speaks for all requests, in one order and many commands at once, so that
what a request gave back is counted before the next one asks. While Redis is away, fails or is slow, requests are
decided by what this gateway has counted itself, which it does all the time. Redis is then left alone but for a sign
of life now and then; the first that succeeds puts back what is held and hands over what was used meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from libs.errors import StoreUnavailable
from libs.obs import get_logger
from libs.obs.metrics import GatewayMetrics
from services.gateway.limits.limiter import Ask, Reservation
from services.gateway.limits.own_counts import OwnCounts
from services.gateway.limits.redis_counts import (
    Command,
    Reply,
    decision_of,
    renew_command,
    reserve_command,
    settle_command,
)
from services.gateway.limits.rules import SETTLED_MS, Decision, month_tokens_of
from services.gateway.tenant_limits import Limit

log = get_logger("limits")

# So often within the time of a lease it is renewed: one or two may be lost.
_RENEWALS_PER_LEASE: Final = 3
# One exchange must be over well within the time of a call.
_MAX_SETTLEMENTS_AT_ONCE: Final = 500
_MAX_RENEWALS_IN_A_COMMAND: Final = 500


class Counts(Protocol):
    """Redis, as far as limits are counted there."""

    async def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Run commands in their order; raises StoreUnavailable soon, for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSettings:
    """How a gateway shares limits with others."""

    # The name of this process among all that there ever are; it begins the id of each of its holds.
    owner: str
    lease_seconds: float
    timeout_seconds: float
    # Between a refusal for want of what others hold, and asking once more.
    second_look_seconds: float = 0.05
    # Between two signs of life while Redis is away.
    retry_seconds: float = 1.0
    # What is used while Redis is away waits; of more, the oldest are dropped and counted.
    max_settlements: int = 10_000
    # Redis forgets what was settled: whether it had counted one that failed so long ago, nobody can tell.
    max_doubt_seconds: float = SETTLED_MS / 1_000 / 2


@dataclass(slots=True)
class _Question:
    """A request that waits for Redis to decide; None is no answer."""

    ask: Ask
    answer: asyncio.Future[Decision | None]


@dataclass(slots=True)
class _Settlement:
    """What a request has used, until Redis has counted it."""

    ask: Ask
    num_used: int
    first_tried_at: float | None = None


class SharedLimiter:
    """Limits by the counts in Redis, and by the own ones while Redis is away."""

    def __init__(self, shared: Counts, own: OwnCounts, settings: SharingSettings, metrics: GatewayMetrics) -> None:
        self._shared = shared
        self._own = own
        self._settings = settings
        self._metrics = metrics
        self._is_away = False
        self._held: dict[str, Ask] = {}
        self._questions: deque[_Question] = deque()
        self._settlements: deque[_Settlement] = deque()
        self._has_work = asyncio.Event()
        self._all_settled = asyncio.Event()
        self._all_settled.set()
        self._renew_at = 0.0

    async def reserve(self, ask: Ask) -> Reservation:
        """Let Redis decide, or this gateway alone where Redis does not within the time of a call."""
        if self._is_away:
            return self._decide_alone(ask)
        try:
            decision = await self._ask_twice(ask)
        except asyncio.CancelledError:
            self._give_back(ask)
            raise
        if decision is None:
            reservation = self._decide_alone(ask)
            if reservation.decision.refused_by is not None:
                self._give_back(ask)
            return reservation
        if decision.refused_by is None:
            self._own.admit(ask)
        return self._reservation(ask, decision)

    def settle(self, ask: Ask, num_used: int) -> None:
        """Take the end of a request that holds something; called by its hold."""
        if self._held.pop(ask.request_id, None) is not None:
            self._own.settle(ask, num_used)
            self._hand_over(_Settlement(ask, num_used))

    async def run(self) -> None:
        """Speak with Redis until cancelled."""
        while True:
            try:
                await self._wait_for_work()
                await self._speak()
            except StoreUnavailable as error:
                self._lose(error)
                await self._regain()

    async def flush(self, timeout_seconds: float) -> None:
        """Wait until everything is counted in Redis, but not for longer; what is left then is lost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._all_settled.wait()
        if self._settlements:
            self._drop(len(self._settlements))
            self._settlements.clear()

    async def _ask_twice(self, ask: Ask) -> Decision | None:
        """Ask again before a refusal for want of what others hold: it may be on its way from another gateway.

        A client that turns to another gateway for each request would else be refused now and then.
        """
        decision = await self._ask(ask)
        is_for_what_is_held = (
            decision is not None
            and decision.refused_by not in (None, Limit.REQUESTS_PER_MINUTE)
            and decision.standing.num_held > 0
        )
        if not is_for_what_is_held:
            return decision
        await asyncio.sleep(self._settings.second_look_seconds)
        return decision if self._is_away else await self._ask(ask)

    async def _ask(self, ask: Ask) -> Decision | None:
        """Return what Redis decides; None where it does not say so in time, and may have let the request in."""
        question = _Question(ask, asyncio.get_running_loop().create_future())
        # As many wait here as the gateway admits.
        self._questions.append(question)
        self._has_work.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.timeout_seconds):
                return await question.answer
        return None

    def _decide_alone(self, ask: Ask) -> Reservation:
        self._metrics.limit_local_decisions.inc()
        return self._reservation(ask, self._own.reserve(ask))

    def _reservation(self, ask: Ask, decision: Decision) -> Reservation:
        if decision.refused_by is not None:
            self._metrics.limit_refusals.labels(decision.refused_by.value).inc()
            return Reservation(decision)
        if not ask.limits.is_held:
            return Reservation(decision)
        self._held[ask.request_id] = ask
        return Reservation(decision, _SharedHold(self, ask))

    def _give_back(self, ask: Ask) -> None:
        """Let go what Redis may hold, now or later, for a request that is not served."""
        if ask.limits.is_held:
            self._hand_over(_Settlement(ask, 0))

    # --- What the one task does.

    async def _wait_for_work(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._renew_at):
                await self._has_work.wait()
        self._has_work.clear()

    async def _speak(self) -> None:
        """Renew leases when it is time, hand over what was used, then ask: in this order."""
        if asyncio.get_running_loop().time() >= self._renew_at:
            await self._renew()
        while self._settlements or self._questions:
            settlements = self._take_settlements()
            questions = [] if self._settlements else self._take_questions()
            replies = await self._exchange(settlements, questions)
            for question, reply in zip(questions, replies, strict=True):
                _answer(question, decision_of(reply))
        self._all_settled.set()

    async def _exchange(
        self, settlements: Sequence[_Settlement], questions: Sequence[_Question]
    ) -> Sequence[Reply]:
        """Return the replies to the questions; on failure the settlements wait again and nobody is answered."""
        commands = [self._settle_command(settlement) for settlement in settlements]
        commands += [self._reserve_command(question.ask) for question in questions]
        try:
            return (await self._shared.run(commands))[len(settlements) :]
        except StoreUnavailable:
            now = asyncio.get_running_loop().time()
            for settlement in reversed(settlements):
                settlement.first_tried_at = settlement.first_tried_at or now
                self._settlements.appendleft(settlement)
            for question in questions:
                _answer(question, None)
            raise

    async def _renew(self) -> None:
        """Give all holds a new lease, and put back those that Redis has lost."""
        by_tenant: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for ask in self._held.values():
            pair = (self._hold_id(ask), month_tokens_of(ask.limits, ask.num_tokens))
            by_tenant[ask.tenant_id].append(pair)
        commands = [
            renew_command(tenant_id, pairs[first : first + _MAX_RENEWALS_IN_A_COMMAND], lease_ms=self._lease_ms)
            for tenant_id, pairs in by_tenant.items()
            for first in range(0, len(pairs), _MAX_RENEWALS_IN_A_COMMAND)
        ]
        replies = await self._shared.run(commands) if commands else []
        num_restored = sum(reply for reply in replies if isinstance(reply, int))
        self._metrics.limit_holds_restored.inc(num_restored)
        loop = asyncio.get_running_loop()
        self._renew_at = loop.time() + self._settings.lease_seconds / _RENEWALS_PER_LEASE

    # --- When Redis goes and comes.

    def _lose(self, error: StoreUnavailable) -> None:
        self._is_away = True
        self._metrics.limit_store_losses.inc()
        log.warning("limits are counted by this gateway alone until Redis answers again", error=error.message)
        while self._questions:
            _answer(self._questions.popleft(), None)

    async def _regain(self) -> None:
        """Try until Redis answers and knows everything again."""
        while True:
            await asyncio.sleep(self._settings.retry_seconds)
            with suppress(StoreUnavailable):
                await self._shared.run(())
                await self._renew()
                await self._speak()
                break
        self._is_away = False
        log.info("limits are counted in Redis again")

    # --- What waits for Redis.

    def _hand_over(self, settlement: _Settlement) -> None:
        self._settlements.append(settlement)
        if len(self._settlements) > self._settings.max_settlements:
            self._settlements.popleft()
            self._drop(1)
        self._all_settled.clear()
        self._has_work.set()

    def _take_settlements(self) -> list[_Settlement]:
        """Take as many as go in one exchange; those that may have been counted long ago are dropped."""
        oldest_try = asyncio.get_running_loop().time() - self._settings.max_doubt_seconds
        taken: list[_Settlement] = []
        while self._settlements and len(taken) < _MAX_SETTLEMENTS_AT_ONCE:
            settlement = self._settlements.popleft()
            if settlement.first_tried_at is not None and settlement.first_tried_at < oldest_try:
                self._drop(1)
            else:
                taken.append(settlement)
        return taken

    def _take_questions(self) -> list[_Question]:
        questions = [question for question in self._questions if not question.answer.done()]
        self._questions.clear()
        return questions

    def _drop(self, num_settlements: int) -> None:
        self._metrics.limit_settlements_dropped.inc(num_settlements)

    # --- Commands.

    def _hold_id(self, ask: Ask) -> str:
        return f"{self._settings.owner}/{ask.request_id}"

    @property
    def _lease_ms(self) -> int:
        return round(self._settings.lease_seconds * 1_000)

    def _reserve_command(self, ask: Ask) -> Command:
        hold_id = self._hold_id(ask)
        return reserve_command(ask.tenant_id, ask.limits, hold_id, ask.num_tokens, lease_ms=self._lease_ms)

    def _settle_command(self, settlement: _Settlement) -> Command:
        ask = settlement.ask
        return settle_command(ask.tenant_id, ask.limits, self._hold_id(ask), settlement.num_used)


class _SharedHold:
    """One request's."""

    def __init__(self, limiter: SharedLimiter, ask: Ask) -> None:
        self._limiter = limiter
        self._ask = ask

    def close(self, num_used: int) -> None:
        """Tell what was used."""
        self._limiter.settle(self._ask, num_used)


def _answer(question: _Question, decision: Decision | None) -> None:
    # Who has waited long enough is gone.
    if not question.answer.done():
        question.answer.set_result(decision)
