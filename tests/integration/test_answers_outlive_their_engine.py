"""Answers of the real model whose worker or engine is killed on the way are those of an undisturbed system."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import pytest

from tests.integration.observations import audit_rows, metric, seconds_until_no_block_is_held
from tests.integration.octavo import RunningOctavo
from tests.patience import PATIENCE_SECONDS

StartOctavo = Callable[..., AbstractContextManager[RunningOctavo]]

MODEL: Final = "smollm2-135m-instruct"
# So many tokens of a stream are there when the process is killed.
NUM_TOKENS_BEFORE: Final = 5

PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 8, "maxItems": 12},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TOOL: Final = {
    "type": "function",
    "function": {"name": "keep", "description": "Keeps a person.", "parameters": PERSON},
}

# Each is sent with a seed; the prompts differ, so that none finds its beginning in the cache.
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "top_p": 0.95},
    "three choices": {"temperature": 1.0, "n": 3},
    "log-probabilities": {"temperature": 0.8, "logprobs": True, "top_logprobs": 3},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "logit_bias": {"260": -5, "732": 3},
        "min_tokens": 36,
        "ignore_eos": False,
    },
    "schema": {
        "temperature": 0.8,
        "ignore_eos": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    },
    "tool": {"temperature": 0.8, "ignore_eos": False, "tools": [TOOL], "tool_choice": "required"},
    # Never found, and always half of it is there.
    "stop string": {"temperature": 0.8, "stop": [" the river that", "e\u00e9"], "stop_token_ids": [49150]},
}


def body_of(name: str, *, is_streaming: bool, max_tokens: int) -> dict[str, Any]:
    number = list(REQUESTS).index(name)
    turn = {"role": "user", "content": f"Number {number}: tell me a long story about a river and a town."}
    body = {"model": MODEL, "messages": [turn], "seed": 1000 + number, "max_tokens": max_tokens, "ignore_eos": True}
    if is_streaming:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    elif "logprobs" in REQUESTS[name]:
        body |= {"prompt_logprobs": 1}
    return body | REQUESTS[name]


@dataclass(frozen=True)
class Asked:
    """What is asked at once: each of these, streamed and whole, or only streamed."""

    names: Sequence[str]
    max_tokens: int
    is_whole_too: bool

    @property
    def modes(self) -> list[tuple[str, bool]]:
        """The names, and whether each is streamed."""
        modes = (True, False) if self.is_whole_too else (True,)
        return [(name, is_streaming) for name in self.names for is_streaming in modes]


class Answers:
    """Asks for everything at once."""

    def __init__(self, session: aiohttp.ClientSession, asked: Asked) -> None:
        self._session = session
        self._asked = asked
        self._begun = asyncio.Semaphore(0)

    async def until_begun(self) -> None:
        """Return when each stream has some tokens."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            for _ in self._asked.names:
                await self._begun.acquire()

    async def all(self) -> dict[tuple[str, bool], Any]:
        """Return all answers, without what differs from one time to the next."""
        modes = self._asked.modes
        answers = await asyncio.gather(*(self._ask(*mode) for mode in modes))
        return dict(zip(modes, answers, strict=True))

    async def _ask(self, name: str, is_streaming: bool) -> Any:
        body = body_of(name, is_streaming=is_streaming, max_tokens=self._asked.max_tokens)
        async with self._session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            if not is_streaming:
                return self._whole(await response.json())
            return await self._streamed(response)

    def _whole(self, answer: dict[str, Any]) -> Any:
        usage = answer["usage"]
        for choice in answer["choices"]:
            for call in choice["message"].get("tool_calls") or ():
                del call["id"]
        return {
            "choices": answer["choices"],
            "counts": (usage["prompt_tokens"], usage["completion_tokens"]),
            "prompt_logprobs": answer.get("prompt_logprobs"),
        }

    async def _streamed(self, response: aiohttp.ClientResponse) -> Any:
        events: list[dict[str, Any]] = []
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            events.append(json.loads(line[6:]))
            assert "error" not in events[-1], events[-1]
            if len(events) == NUM_TOKENS_BEFORE:
                self._begun.release()
            last = line
        assert last, "a stream has events"
        assert len({event["id"] for event in events}) == 1
        usage = events[-1]["usage"]
        parts = [part for event in events for part in event["choices"]]
        indices = sorted({part["index"] for part in parts})
        return {
            "choices": [_joined([part for part in parts if part["index"] == index]) for index in indices],
            "counts": (usage["prompt_tokens"], usage["completion_tokens"]),
        }


def _joined(parts: list[dict[str, Any]]) -> Any:
    """One choice of a stream; it has one beginning and one end."""
    assert sum("role" in part["delta"] for part in parts) == 1
    calls = [call for part in parts for call in part["delta"].get("tool_calls") or ()]
    return {
        "text": "".join(part["delta"].get("content") or "" for part in parts),
        "names": [call["function"]["name"] for call in calls if call["function"].get("name")],
        "arguments": "".join(call["function"].get("arguments") or "" for call in calls),
        "ends": [part["finish_reason"] for part in parts if part["finish_reason"]],
        "logprobs": [entry for part in parts if part.get("logprobs") for entry in part["logprobs"]["content"]],
    }


@asynccontextmanager
async def session_of(octavo: RunningOctavo) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=4 * PATIENCE_SECONDS)
    async with aiohttp.ClientSession(octavo.base_url, timeout=timeout) as session:
        yield session


async def check_kills(octavo: RunningOctavo, asked: Asked, victims: list[str], *, num_hit: int) -> None:
    """Whoever of ``victims`` is killed, each answer is that of the undisturbed system; so many are hit at least."""
    async with session_of(octavo) as session:
        undisturbed = await Answers(session, asked).all()
        for victim in victims:
            answers = Answers(session, asked)
            asking = asyncio.create_task(answers.all())
            await answers.until_begun()
            pid = octavo.kill(victim)
            disturbed = await asking
            await asyncio.to_thread(octavo.wait_until_healthy, victim, after_pid=pid)

            for mode, answer in undisturbed.items():
                assert disturbed[mode] == answer, (victim, mode)
    await seconds_until_no_block_is_held(octavo)
    rows = audit_rows(octavo, at_least=len(undisturbed) * (1 + len(victims)))
    assert {row["status"] for row in rows} <= {"stop", "length"}
    assert sum(row["num_retries"] > 0 for row in rows) >= num_hit
    assert metric(octavo, "octavo_gateway_resumptions_total", outcome="resumed") > 0
    assert metric(octavo, "octavo_gateway_resumptions_total", outcome="failed") == 0


async def test_answers_are_the_same_when_the_worker_is_killed(running_octavo: StartOctavo) -> None:
    names = ("greedy", "three choices", "log-probabilities", "penalties", "schema")
    with running_octavo() as octavo:
        await check_kills(octavo, Asked(names, 40, is_whole_too=False), ["worker-0"], num_hit=3)


ALL: Final = Asked(list(REQUESTS), 96, is_whole_too=True)


@pytest.mark.slow
async def test_answers_are_the_same_whoever_is_killed_however_often(running_octavo: StartOctavo) -> None:
    with running_octavo() as octavo:
        await check_kills(octavo, ALL, ["engine-0", "worker-0", "engine-0"], num_hit=2 * len(ALL.modes))


@pytest.mark.slow
async def test_another_engine_goes_on_with_what_one_had(running_octavo: StartOctavo) -> None:
    with running_octavo("--engines", "2") as octavo:
        await check_kills(octavo, ALL, ["engine-0", "engine-1"], num_hit=2)
