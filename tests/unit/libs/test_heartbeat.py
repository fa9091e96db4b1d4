"""Signs of life through a pipe: of an event loop that runs, hangs, or is not there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest

from libs.lifecycle import HeartbeatPipe
from libs.lifecycle.heartbeat import beat, take_descriptor
from tests.patience import PATIENCE_SECONDS


@pytest.fixture
async def pipe() -> AsyncIterator[HeartbeatPipe]:
    pipe = HeartbeatPipe()
    yield pipe
    pipe.close()


async def test_who_beats_is_not_silent_and_who_stops_is(pipe: HeartbeatPipe) -> None:
    # A beat comes each half second.
    silence = asyncio.create_task(pipe.wait_until_silent(1.2))
    beating = asyncio.create_task(beat(pipe.write_fd))
    await asyncio.sleep(1.5)
    was_silent = silence.done()
    beating.cancel()

    async with asyncio.timeout(PATIENCE_SECONDS):
        await silence

    assert not was_silent


async def test_the_first_beat_is_waited_for_as_long_as_it_takes(pipe: HeartbeatPipe) -> None:
    silence = asyncio.create_task(pipe.wait_until_silent(0.05))
    await asyncio.sleep(0.3)
    was_silent = silence.done()
    os.write(pipe.write_fd, b".")

    async with asyncio.timeout(PATIENCE_SECONDS):
        await silence

    assert not was_silent


async def test_a_starter_that_was_stopped_itself_looks_before_it_judges(pipe: HeartbeatPipe) -> None:
    silence = asyncio.create_task(pipe.wait_until_silent(1.2))
    os.write(pipe.write_fd, b".")

    for num_beats in (0, 0, 0, 1):
        await _run_what_is_due()
        # Longer than a part of the silence; in the last the process beats while nobody can look.
        os.write(pipe.write_fd, b"." * num_beats)
        time.sleep(0.35)
    await _run_what_is_due()
    was_silent = silence.done()
    silence.cancel()

    assert not was_silent


async def _run_what_is_due() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_starter_that_reads_nothing_stops_nobody(pipe: HeartbeatPipe) -> None:
    while True:
        try:
            os.write(pipe.write_fd, bytes(4096))
        except BlockingIOError:
            break

    beating = asyncio.create_task(beat(pipe.write_fd))
    await asyncio.sleep(0.05)

    assert not beating.done()
    beating.cancel()


async def test_a_process_hands_its_pipe_to_nobody(pipe: HeartbeatPipe) -> None:
    environ = {"HOME": "/", **pipe.environ}

    assert take_descriptor(environ) == pipe.write_fd
    assert environ == {"HOME": "/"}
    assert take_descriptor(environ) is None
