"""What waits for a peer is bounded."""

from __future__ import annotations

import asyncio

from libs.errors import Overloaded
from services.engine.outbox import Outbox
from tests.patience import PATIENCE_SECONDS


async def read_all(outbox: Outbox[int]) -> list[int]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return [message async for message in outbox]


async def test_messages_come_in_order_until_closed() -> None:
    outbox: Outbox[int] = Outbox(4)
    reader = asyncio.create_task(read_all(outbox))

    for number in range(10):
        outbox.put(number)
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    outbox.close()

    assert await reader == list(range(10))
    assert outbox.error is None


async def test_a_reader_that_does_not_keep_up_is_cut_off_and_told_why() -> None:
    outbox: Outbox[int] = Outbox(4)

    for number in range(5):
        outbox.put(number)
    outbox.put(99)

    assert await read_all(outbox) == []
    assert isinstance(outbox.error, Overloaded)
