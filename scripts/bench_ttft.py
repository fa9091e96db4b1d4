"""Measure time to first token, cold and cached, and the load that keeps promises; one JSON object is the last line.

First a prompt of 1,000 tokens is sent alone, and again when its blocks are in the prefix cache. Then, for two kinds
of request, the highest offered rate is searched by bisection at which p99 TTFT stays within 200 ms and p99 ITL
within 25 ms. Arrivals are open-loop: a seeded Poisson process that does not wait for answers. A rate that has
broken its promise too often to be kept is given up at once. Without ``BASE`` a fresh ``octavo up`` is measured,
with the engine's ``target_itl`` set so that prompts give way to decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from libs.text import EMBEDDED_MODEL_NAME, load_model_text, resolve_model_path
from scripts.load_client import LoadClient, Prompt, PromptMaker, Stream, summary
from scripts.octavo_under_test import cpu_model, running_octavo

_NUM_PROMPT_TOKENS = 1_000
_TARGET_ITL_SECONDS = 0.02
_TTFT_SECONDS, _ITL_SECONDS = 0.2, 0.025
_ALLOWED_SHARE = 0.01  # of p99
# A search ends when the two rates differ by less than this share of the upper one.
_RESOLUTION = 0.08


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One kind of request whose rate is searched."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int


KINDS = (RequestKind("128/128", 128, 128), RequestKind("1000/100", 1_000, 100))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="URL of the server to measure; empty starts octavo up")
    parser.add_argument("--model", default=EMBEDDED_MODEL_NAME, help="as --model of octavo up")
    parser.add_argument("--set", action="append", default=[], help="passed to octavo up")
    parser.add_argument("--repeats", type=int, default=8, help="prompts sent cold and cached")
    parser.add_argument("--probe-seconds", type=float, default=15.0, help="time of arrivals at one rate")
    parser.add_argument("--search-seconds", type=float, default=140.0, help="no probe of a kind begins after that")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    maker = PromptMaker(load_model_text(resolve_model_path(options.model)).tokenizer, options.seed)
    with _server(options) as base_url:
        measured = asyncio.run(_measure(base_url, maker, options))
    print(
        json.dumps(
            {
                "benchmark": "ttft",
                "options": vars(options),
                "machine": {"cpu": cpu_model(), "num_cores": os.cpu_count(), "python": platform.python_version()},
                **measured,
            }
        )
    )


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    if options.base:
        yield options.base.rstrip("/")
        return
    settings = [f"engine.target_itl={_TARGET_ITL_SECONDS}", *options.set]
    with running_octavo(
        ["--model", options.model, *(part for value in settings for part in ("--set", value))]
    ) as state:
        yield state["base_url"]


async def _measure(base_url: str, maker: PromptMaker, options: argparse.Namespace) -> dict[str, Any]:
    client = await LoadClient.connect(base_url)
    try:
        await client.send(Prompt(maker.words(8), 4))
        ttft = await _cold_and_cached(client, maker, options.repeats)
        print(f"TTFT of {_NUM_PROMPT_TOKENS} tokens: {json.dumps(ttft)}", flush=True)
        rates = [await _search(client, maker, kind, options) for kind in KINDS]
    finally:
        await client.close()
    return {"ttft": ttft, "highest_rates": rates}


async def _cold_and_cached(client: LoadClient, maker: PromptMaker, repeats: int) -> dict[str, Any]:
    cold: list[float] = []
    cached: list[float] = []
    for _ in range(repeats):
        prompt = Prompt(maker.words(_NUM_PROMPT_TOKENS), 2)
        for times in (cold, cached):
            stream = await client.send(prompt)
            if stream.error is not None:
                raise SystemExit(f"A request failed: {stream.error}.")
            times.append(round(1e3 * stream.ttft_seconds, 2))
    cold_ms, cached_ms = statistics.median(cold), statistics.median(cached)
    return {
        "num_prompt_tokens": stream.num_prompt_tokens,
        "cold_ms": cold,
        "cached_ms": cached,
        "cold_median_ms": cold_ms,
        "cached_median_ms": cached_ms,
        "less": round(1 - cached_ms / cold_ms, 4),
    }


async def _search(
    client: LoadClient, maker: PromptMaker, kind: RequestKind, options: argparse.Namespace
) -> dict[str, Any]:
    """Bisect between a rate that holds and one that does not, from what the server does with all it can get."""
    closed = [Prompt(maker.words(kind.num_prompt_tokens), kind.num_output_tokens) for _ in range(16)]
    started = time.perf_counter()
    await client.send_closed(closed, concurrency=8)
    capacity = len(closed) / (time.perf_counter() - started)
    deadline = time.monotonic() + options.search_seconds
    low, high, probes = 0.0, capacity, list[dict[str, Any]]()
    while high - low > _RESOLUTION * high and time.monotonic() < deadline:
        rate = (low + high) / 2
        probe = await _offer(client, maker, kind, rate, options)
        probes.append(probe)
        print(f"{kind.name}: {json.dumps(probe)}", flush=True)
        low, high = (rate, high) if probe["holds"] else (low, rate)
        if not probe["holds"] and probe["num_arrivals"] == 1:
            break  # A request that has the machine to itself breaks the promise, and so does every rate.
    return {
        "kind": asdict(kind),
        # None: there was no time to try any; 0: none of those tried was kept.
        "requests_per_second": round(low, 3) if probes else None,
        "capacity_requests_per_second": round(capacity, 3),
        "ttft_p99_at_most_ms": 1e3 * _TTFT_SECONDS,
        "itl_p99_at_most_ms": 1e3 * _ITL_SECONDS,
        "probes": probes,
    }


async def _offer(
    client: LoadClient, maker: PromptMaker, kind: RequestKind, rate: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Offer requests at a rate; returns their figures and whether the promise was kept."""
    arrivals = arrival_times(rate, options.probe_seconds, options.seed)
    prompts = [Prompt(maker.words(kind.num_prompt_tokens), kind.num_output_tokens) for _ in arrivals]
    started, streams = time.perf_counter(), list[Stream]()
    is_broken = asyncio.Event()

    async def request(due: float, prompt: Prompt) -> None:
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        streams.append(await client.send(prompt))
        if sum(_breaks_ttft(stream) for stream in streams) > _ALLOWED_SHARE * len(arrivals):
            is_broken.set()

    requests = [asyncio.create_task(request(due, prompt)) for due, prompt in zip(arrivals, prompts, strict=True)]
    broken = asyncio.create_task(is_broken.wait())
    waiting: set[asyncio.Task[Any]] = {*requests}  # Any: what they return is not looked at.
    try:
        while waiting and not broken.done():
            await asyncio.wait({*waiting, broken}, return_when=asyncio.FIRST_COMPLETED)
            waiting = {task for task in waiting if not task.done()}
    finally:
        for task in (*requests, broken):
            task.cancel()
        await asyncio.gather(*requests, broken, return_exceptions=True)
    figures = summary(streams, time.perf_counter() - started)
    return {
        "offered_requests_per_second": round(rate, 3),
        "num_arrivals": len(arrivals),
        **figures,
        "was_given_up": is_broken.is_set(),
        "holds": not is_broken.is_set() and keeps_promise(streams),
    }


def arrival_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrivals of a Poisson process of ``rate`` a second within ``seconds``; at least one."""
    random = np.random.default_rng(seed)
    times, now = list[float](), 0.0
    while (now := now + float(random.exponential(1 / rate))) < seconds:
        times.append(now)
    return times or [0.0]


def keeps_promise(streams: Sequence[Stream]) -> bool:
    """Whether p99 of TTFT and of the gaps between tokens are within their limits, and nothing failed."""
    gaps = np.array([gap for stream in streams for gap in stream.itl_seconds])
    late = sum(_breaks_ttft(stream) for stream in streams)
    return bool(
        late <= _ALLOWED_SHARE * len(streams) and (not len(gaps) or (gaps > _ITL_SECONDS).mean() <= _ALLOWED_SHARE)
    )


def _breaks_ttft(stream: Stream) -> bool:
    return stream.error is not None or stream.ttft_seconds > _TTFT_SECONDS


if __name__ == "__main__":
    main()
