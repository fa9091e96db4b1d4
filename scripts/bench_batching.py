"""Continuous against static batching, over HTTP with the real model, on one seeded trace.

Every request has a prompt of its own and an output length of its own (log-normal), so that a static batch waits for
its longest. All are sent at once; the engine runs 16 sequences at most. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from typing import Any

import aiohttp
import numpy as np

from scripts.octavo_under_test import cpu_model, running_octavo

_TIMEOUT_SECONDS = 900.0
_MAX_NUM_SEQS = 16


def main() -> None:
    """Run the trace under both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--mean-output-tokens", type=float, default=48)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    lengths = np.clip(random.lognormal(np.log(options.mean_output_tokens) - 0.32, 0.8, options.requests), 1, 400)
    result: dict[str, Any] = {
        "benchmark": "batching",
        "options": vars(options),
        "machine": {"cpu": cpu_model(), "num_cores": os.cpu_count(), "python": platform.python_version()},
        "max_num_seqs": _MAX_NUM_SEQS,
    }
    for batching in ("static", "continuous"):
        flags = ["--set", f"engine.batching={batching}", "--set", f"engine.max_num_seqs={_MAX_NUM_SEQS}"]
        # A static batch is what joins in one step: the budget must hold all its prompts.
        flags += ["--set", "engine.max_num_batched_tokens=2048", "--set", "engine.max_prefill_share=1"]
        with running_octavo(flags) as state:
            result[batching] = asyncio.run(_run(state["base_url"], [int(length) for length in lengths]))
    result["speedup"] = result["static"]["duration_seconds"] / result["continuous"]["duration_seconds"]
    print(json.dumps(result))


async def _run(base_url: str, lengths: list[int]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url, timeout=timeout, connector=connector) as session:
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        await _complete(session, model, -1, 4)
        started_at = time.monotonic()
        usages = await asyncio.gather(
            *(_complete(session, model, number, length) for number, length in enumerate(lengths))
        )
        duration_seconds = time.monotonic() - started_at
    num_output_tokens = sum(usage["completion_tokens"] for usage in usages)
    return {
        "duration_seconds": duration_seconds,
        "num_prompt_tokens": sum(usage["prompt_tokens"] for usage in usages),
        "num_output_tokens": num_output_tokens,
        "output_tokens_per_second": num_output_tokens / duration_seconds,
    }


async def _complete(session: aiohttp.ClientSession, model: str, number: int, length: int) -> dict[str, int]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{number}. Tell a story about the number {number}."}],
        "max_tokens": length,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        usage: dict[str, int] = (await response.json())["usage"]
        return usage


if __name__ == "__main__":
    main()
