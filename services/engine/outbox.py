"""What waits to be sent to one peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from libs.errors import OctavoError, Overloaded

MessageT = TypeVar("MessageT")


class Outbox(Generic[MessageT]):
    """A bounded queue of messages for one peer. A peer that does not keep up is cut off, not waited for."""

    def __init__(self, max_messages: int) -> None:
        self._queue: asyncio.Queue[MessageT | None] = asyncio.Queue(max_messages)
        self._is_closed = False
        self.error: OctavoError | None = None

    def put(self, message: MessageT) -> None:
        """Add a message; beyond the bound the outbox closes and drops everything."""
        if self._is_closed:
            return
        if self._queue.full():
            self.close(Overloaded("The peer does not read what it asked for.", retry_after_seconds=1.0))
        else:
            self._queue.put_nowait(message)

    def close(self, error: OctavoError | None = None) -> None:
        """End the reader's iteration at once; ``error`` says why."""
        if self._is_closed:
            return
        self._is_closed, self.error = True, error
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[MessageT]:
        while (message := await self._queue.get()) is not None:
            yield message
