"""A small client for benchmarks: prompts of known length, and streams with the times at which their tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from libs.text import Tokenizer

REQUEST_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks."""

    text: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One request as its client saw it; durations in seconds."""

    error: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_seconds: float
    itl_seconds: tuple[float, ...]  # between texts that came one after the other


class PromptMaker:
    """Makes prompts of random words, each of which is one token."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        texts = (tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size))
        self._words = [
            text.decode() for text in texts if text[:1] == b" " and text[1:].isalpha() and text.isascii()
        ]
        self._random = np.random.default_rng(seed)

    def words(self, count: int) -> str:
        """Return a text of ``count`` tokens, another one each time."""
        return "".join(self._words[index] for index in self._random.integers(0, len(self._words), count))


class LoadClient:
    """Sends requests to one server; made by ``connect``."""

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model

    @classmethod
    async def connect(cls, base_url: str) -> LoadClient:
        """Ask the server which model it has. Raises aiohttp.ClientError when it cannot be reached."""
        session = aiohttp.ClientSession(
            base_url,
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0),
        )
        try:
            return cls(session, await first_model(session))
        except BaseException:
            await session.close()
            raise

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def send(self, prompt: Prompt) -> Stream:
        """Send one request and read its stream to the end; a failure is a stream with an error."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": prompt.num_output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first, times = time.perf_counter(), float("inf"), list[float]()
        usage, error = {"prompt_tokens": 0, "completion_tokens": 0}, None
        try:
            async with self._session.post("/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    error = f"HTTP {response.status}"
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        chunk: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                        error = chunk["error"]["code"] if "error" in chunk else error
                        usage = chunk.get("usage") or usage
                        now, choices = time.perf_counter(), chunk.get("choices", ())
                        # The first message may hold no text: its token can be one that is not shown.
                        first = min(first, now) if choices else first
                        if any(choice["delta"].get("content") for choice in choices):
                            times.append(now)
        except (aiohttp.ClientError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error is None and usage["completion_tokens"] != prompt.num_output_tokens:
            error = f"{usage['completion_tokens']} tokens came instead of {prompt.num_output_tokens}"
        gaps = tuple(float(gap) for gap in np.diff(times))
        return Stream(error, usage["prompt_tokens"], usage["completion_tokens"], first - started, gaps)

    async def send_closed(self, prompts: Iterable[Prompt], concurrency: int) -> list[Stream]:
        """Send all prompts, ``concurrency`` of them at any time."""
        waiting = iter(prompts)

        async def client() -> list[Stream]:
            return [await self.send(prompt) for prompt in waiting]

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(client()) for _ in range(concurrency)]
        return [stream for task in clients for stream in task.result()]


async def first_model(session: aiohttp.ClientSession) -> str:
    """Return the name of the first model that a server lists."""
    async with session.get("/v1/models") as response:
        response.raise_for_status()
        name: str = (await response.json())["data"][0]["id"]
        return name


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    """Return a percentile in milliseconds."""
    return round(1e3 * float(np.percentile(seconds, percent, method="higher")), 2) if len(seconds) else 0.0


def summary(streams: Sequence[Stream], duration_seconds: float) -> dict[str, Any]:
    """Return the figures of a run: counts, output tokens a second, TTFT and ITL."""
    gaps = [gap for stream in streams for gap in stream.itl_seconds]
    ttfts = [stream.ttft_seconds for stream in streams if stream.error is None]
    num_output_tokens = sum(stream.num_output_tokens for stream in streams)
    return {
        "num_requests": len(streams),
        "num_failed": sum(stream.error is not None for stream in streams),
        "num_prompt_tokens": sum(stream.num_prompt_tokens for stream in streams),
        "num_output_tokens": num_output_tokens,
        "duration_seconds": round(duration_seconds, 3),
        "output_tokens_per_second": round(num_output_tokens / duration_seconds, 2),
        "ttft_p50_ms": percentile_ms(ttfts, 50),
        "ttft_p99_ms": percentile_ms(ttfts, 99),
        "itl_p50_ms": percentile_ms(gaps, 50),
        "itl_p99_ms": percentile_ms(gaps, 99),
    }
