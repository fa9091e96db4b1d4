"""Whether a process gives signs of life, as its starter sees it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from services.supervisor.plan import ValkeyPing
from services.supervisor.probes import wait_until_silent
from tests.patience import PATIENCE_SECONDS

LIMIT_SECONDS = 0.4


async def test_who_was_stopped_in_the_middle_of_a_question_asks_once_more(tmp_path: Path) -> None:
    """A container that is paused stops those who ask and those who answer, and the clock goes on."""
    has_answered_again = asyncio.Event()
    num_questions = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_questions
        num_questions += 1
        if num_questions == 1:
            time.sleep(2 * LIMIT_SECONDS)
        else:
            has_answered_again.set()
        writer.write(b"+PONG\r\n")
        writer.close()

    path = tmp_path / "valkey.sock"
    server = await asyncio.start_unix_server(answer, path)
    silence = asyncio.create_task(wait_until_silent(ValkeyPing(path), LIMIT_SECONDS))

    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.wait(
            [silence, asyncio.create_task(has_answered_again.wait())], return_when=asyncio.FIRST_COMPLETED
        )
    was_silent = silence.done()
    silence.cancel()
    server.close()

    assert not was_silent


async def test_who_answers_nothing_is_silent(tmp_path: Path) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    path = tmp_path / "valkey.sock"
    server = await asyncio.start_unix_server(say_nothing, path)

    async with asyncio.timeout(PATIENCE_SECONDS):
        await wait_until_silent(ValkeyPing(path), LIMIT_SECONDS)

    server.close()
