"""A model in two ranks, two processes of ``octavo up``: what is told and what goes on when one is lost.

The cases are those of a serving system whose writer spun for ever when a rank had died before it read (ENG-02 of
the known faults).
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import pytest

from tests.integration.octavo import RunningOctavo, start_octavo
from tests.integration.test_whole_system import chat, complete, served_again, session_of
from tests.patience import PATIENCE_SECONDS
from tests.unit.worker.kernels.native_models import needs_kernels

pytestmark = needs_kernels

RANK_0, RANK_1 = "worker-0-0", "worker-0-1"
# A worker that drains takes no calls, so it must have ended before it counts as silent.
EXCHANGE_SECONDS, DRAIN_SECONDS, SILENCE_SECONDS = 2, 3, 6
FLAGS = (
    *("--tensor-parallel-size", "2"),
    *("--set", f"worker.exchange_timeout_seconds={EXCHANGE_SECONDS}"),
    *("--set", f"worker.drain_grace_seconds={DRAIN_SECONDS}"),
    *("--set", "worker.kv_cache_memory=128MiB"),
    *("--worker-silence-seconds", str(SILENCE_SECONDS)),
    *("--max-restarts-per-minute", "30"),
)
LONG_ANSWER: Final[dict[str, Any]] = {"max_tokens": 120, "temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def octavo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningOctavo]:
    with start_octavo(tmp_path_factory.mktemp("ranks") / "data", *FLAGS) as octavo:
        yield octavo


@pytest.fixture
async def session(octavo: RunningOctavo) -> AsyncIterator[aiohttp.ClientSession]:
    async with session_of(octavo) as session:
        yield session


async def test_a_rank_that_is_killed_in_a_step_is_replaced(
    octavo: RunningOctavo, session: aiohttp.ClientSession
) -> None:
    before, survivor = await text_of_answer(session), octavo.pid_of(RANK_0)

    async with streams_that_go_on(session):
        killed = octavo.kill(RANK_1)

    await assert_same_text(session, before)
    assert exit_code_of(octavo, RANK_1, killed) == -signal.SIGKILL
    # The other rank has come into the new group; only what died was started again.
    assert octavo.pid_of(RANK_0) == survivor


@pytest.mark.slow
async def test_an_idle_rank_that_is_killed_is_replaced(
    octavo: RunningOctavo, session: aiohttp.ClientSession
) -> None:
    before = await text_of_answer(session)

    killed = octavo.kill(RANK_1)
    octavo.wait_until_healthy(RANK_1, after_pid=killed)

    await assert_same_text(session, before)
    assert exit_code_of(octavo, RANK_1, killed) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("rank", [RANK_0, RANK_1])
async def test_a_rank_that_is_killed_while_the_other_waits_for_it_is_replaced(
    octavo: RunningOctavo, session: aiohttp.ClientSession, rank: str
) -> None:
    before = await text_of_answer(session)

    async with streams_that_go_on(session):
        # The step has gone to both, and the other rank waits for this one's part of a sum.
        octavo.kill(rank, signal.SIGSTOP)
        await asyncio.sleep(EXCHANGE_SECONDS / 4)
        killed = octavo.kill(rank)

    await assert_same_text(session, before)
    assert exit_code_of(octavo, rank, killed) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
async def test_a_stop_of_rank_0_is_told_and_healed(
    octavo: RunningOctavo, session: aiohttp.ClientSession, number: signal.Signals, exit_code: int
) -> None:
    before = await text_of_answer(session)

    async with streams_that_go_on(session):
        stopped = octavo.kill(RANK_0, number)

    await assert_same_text(session, before)
    assert exit_code_of(octavo, RANK_0, stopped) == exit_code


@pytest.mark.slow
@pytest.mark.parametrize("rank", [RANK_0, RANK_1])
async def test_a_rank_that_freezes_is_killed_and_replaced(
    octavo: RunningOctavo, session: aiohttp.ClientSession, rank: str
) -> None:
    before = await text_of_answer(session)

    async with streams_that_go_on(session):
        frozen = octavo.kill(rank, signal.SIGSTOP)

    await assert_same_text(session, before)
    assert exit_code_of(octavo, rank, frozen) == -signal.SIGKILL


@pytest.mark.slow
async def test_a_rank_that_was_frozen_for_a_while_comes_into_the_next_group(
    octavo: RunningOctavo, session: aiohttp.ClientSession
) -> None:
    before = await text_of_answer(session)

    async with streams_that_go_on(session):
        frozen = octavo.kill(RANK_1, signal.SIGSTOP)
        await asyncio.sleep(EXCHANGE_SECONDS + 0.5)
        octavo.kill(RANK_1, signal.SIGCONT)

    await assert_same_text(session, before)
    assert octavo.pid_of(RANK_1) == frozen


async def text_of_answer(session: aiohttp.ClientSession) -> str:
    await served_again(session)
    status, body = await complete(session, max_tokens=12, temperature=0)
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


async def assert_same_text(session: aiohttp.ClientSession, expected: str) -> None:
    # The first good answer; until then everything must be a clear error.
    body = await served_again(session, max_tokens=12, temperature=0)
    assert body["choices"][0]["message"]["content"] == expected


@asynccontextmanager
async def streams_that_go_on(session: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Run streams that are in the middle of their tokens; all must end with the text of an undisturbed answer."""
    questions = [f"Tell me story {index} of a river." for index in range(3)]
    undisturbed = [await complete(session, content=question, **LONG_ANSWER) for question in questions]
    events = [asyncio.Event() for _ in questions]
    streams = [
        asyncio.create_task(streamed_text(session, event, question))
        for question, event in zip(questions, events, strict=True)
    ]
    for event in events:
        await event.wait()
    yield
    async with asyncio.timeout(PATIENCE_SECONDS):
        texts = await asyncio.gather(*streams)
    assert texts == [body["choices"][0]["message"]["content"] for _, body in undisturbed]


async def streamed_text(session: aiohttp.ClientSession, started: asyncio.Event, question: str) -> str:
    """Return the text of a stream that ends well; ``started`` is set when some of it is there."""
    text, last = "", b""
    body = chat(question, stream=True, **LONG_ANSWER)
    async with session.post("/v1/chat/completions", json=body) as response:
        async for line in response.content:
            last = line if line.startswith(b"data: ") else last
            if line.startswith(b"data: {"):
                text += "".join(part["delta"].get("content") or "" for part in json.loads(line[6:])["choices"])
            if text:
                started.set()
    assert last == b"data: [DONE]\n", last
    return text


def exit_code_of(octavo: RunningOctavo, name: str, pid: int) -> int:
    """Return the exit code that the supervisor's log has for a process that it has started again since."""
    octavo.wait_until_healthy(name, after_pid=pid)
    ends = [event for event in events_of(octavo, "process ended") if event["process"] == name]
    return int(ends[-1]["exit_code"])


def events_of(octavo: RunningOctavo, name: str) -> list[dict[str, Any]]:
    """Return the supervisor's log lines of one kind."""
    prefix = "[up] "
    lines = [line.removeprefix(prefix) for line in octavo.stderr().splitlines() if line.startswith(prefix)]
    return [event for event in map(json.loads, lines) if event["event"] == name]
