"""Redis as far as limits are counted there, in memory: it can be away, lose everything, or do things too late."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.errors import StoreUnavailable
from services.gateway.limits.redis_counts import Command, Reply
from services.gateway.limits.rules import TenantBook
from services.gateway.tenant_limits import Limit, TenantLimits


@dataclass(slots=True)
class FakeLimitCounts:
    """Counts by the same rules, with the commands of the real one."""

    now_ms: int = 1_800_000_000_000
    books: defaultdict[str, TenantBook] = field(default_factory=lambda: defaultdict(TenantBook))
    is_away: bool = False
    # Takes commands, does not answer, and does them when ``catch_up`` is called.
    is_late: bool = False
    # Answers when this is set.
    may_answer: asyncio.Event | None = None
    num_runs: int = 0
    _waiting: list[Command] = field(default_factory=list)

    async def run(self, commands: Sequence[Command]) -> list[Reply]:
        """Do commands, or fail with all of them."""
        self.num_runs += 1
        if self.is_late:
            self._waiting += commands
        if self.is_away or self.is_late:
            raise StoreUnavailable("The fake is away.")
        replies = [self._do(command) for command in commands]
        if self.may_answer is not None:
            await self.may_answer.wait()
        return replies

    def catch_up(self) -> None:
        """Do what was taken and not answered."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            self._do(command)

    def _do(self, command: Command) -> Reply:
        book = self.books[command.tenant_id]
        name, *arguments = command.arguments
        match name:
            case "reserve":
                return self._reserve(book, arguments)
            case "settle":
                hold_id, num_used, *values = arguments
                limits = _limits((Limit.TOKENS_PER_MINUTE, Limit.TOKENS_PER_MONTH), values)
                return int(book.settle(limits, str(hold_id), int(num_used), now_ms=self.now_ms))
            case _:
                lease_ms, *pairs = arguments
                held = {str(hold_id): int(tokens) for hold_id, tokens in zip(pairs[::2], pairs[1::2], strict=True)}
                return book.renew(held, now_ms=self.now_ms, lease_ms=int(lease_ms))

    def _reserve(self, book: TenantBook, arguments: Sequence[str | int]) -> Reply:
        hold_id, lease_ms, num_tokens, *values = arguments
        limits = _limits(tuple(Limit), values)
        decision = book.reserve(limits, str(hold_id), int(num_tokens), now_ms=self.now_ms, lease_ms=int(lease_ms))
        if decision is None:
            return []
        refused_by = 0 if decision.refused_by is None else 1 + tuple(Limit).index(decision.refused_by)
        standing = decision.standing
        return [
            *(int(not refused_by), refused_by, decision.wait_ms, standing.num_held),
            *(standing.request_debt, standing.token_debt, standing.month_used, standing.month_held),
        ]


def _limits(names: Sequence[Limit], values: Sequence[str | int]) -> TenantLimits:
    given = zip(names, values, strict=True)
    return TenantLimits().changed({limit: None if value == "" else int(value) for limit, value in given})
