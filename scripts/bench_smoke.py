"""Stream many completions at once from a fresh ``octavo up``; print counts and durations as one JSON object.

It starts the whole system on a free port in a temporary folder, sends one request to warm up, then ``--requests``
streaming requests with ``--streams`` of them open at any time, and reads from /proc how much processor time each
process used meanwhile. The last line of stdout is the result; what it means is for its reader to say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from scripts.octavo_under_test import cpu_model, cpu_seconds_by_process, running_octavo

_REQUEST_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One request as its client saw it; durations in seconds."""

    status: str
    num_prompt_tokens: int
    num_completion_tokens: int
    ttft_seconds: float | None
    e2e_seconds: float


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8, help="requests open at once")
    parser.add_argument("--requests", type=int, default=32, help="requests in all")
    parser.add_argument("--max-tokens", type=int, default=64, help="output limit of a request")
    parser.add_argument(
        "--runner", choices=("torch", "stub"), default="torch", help="the model, or deterministic tokens"
    )
    parser.add_argument("--engines", type=int, default=1, help="replicas")
    options = parser.parse_args()
    flags = ["--engines", str(options.engines), "--set", f"worker.runner={options.runner}"]
    with running_octavo(flags) as state:
        result = asyncio.run(_measure(state, options))
    print(json.dumps(result))


async def _measure(state: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=options.streams)
    async with aiohttp.ClientSession(state["base_url"], timeout=timeout, connector=connector) as session:
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        await _stream(session, model, 0, options.max_tokens)
        numbers = iter(range(1, options.requests + 1))
        cpu_before, started_at = cpu_seconds_by_process(state), time.monotonic()

        async def client() -> list[Stream]:
            return [await _stream(session, model, number, options.max_tokens) for number in numbers]

        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(client()) for _ in range(options.streams)]
        duration_seconds = time.monotonic() - started_at
        cpu_after = cpu_seconds_by_process(state)
    streams = [stream for task in clients for stream in task.result()]
    return {
        "benchmark": "smoke",
        "options": vars(options),
        "machine": {"cpu": cpu_model(), "num_cores": os.cpu_count(), "python": platform.python_version()},
        "duration_seconds": round(duration_seconds, 3),
        "num_prompt_tokens": sum(stream.num_prompt_tokens for stream in streams),
        "num_completion_tokens": sum(stream.num_completion_tokens for stream in streams),
        "num_ended_well": sum(stream.status in ("stop", "length") for stream in streams),
        "cpu_seconds": {name: round(cpu_after[name] - cpu_before[name], 2) for name in cpu_after},
        "streams": [asdict(stream) for stream in streams],
    }


async def _stream(session: aiohttp.ClientSession, model: str, number: int, max_tokens: int) -> Stream:
    """Send one request and read its stream to the end."""
    body = {
        "model": model,
        # The number comes first, so that no request finds another's prompt in the prefix cache.
        "messages": [{"role": "user", "content": f"{number}. Tell a story about the number {number}."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_at = time.monotonic()
    ttft_seconds, status, usage = None, "broken off", {"prompt_tokens": 0, "completion_tokens": 0}
    async with session.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            status = f"http {response.status}"
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                status = str(chunk["error"]["code"])
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                if ttft_seconds is None and choice["delta"].get("content"):
                    ttft_seconds = time.monotonic() - started_at
                status = choice["finish_reason"] or status
    e2e_seconds = time.monotonic() - started_at
    return Stream(status, usage["prompt_tokens"], usage["completion_tokens"], ttft_seconds, e2e_seconds)


if __name__ == "__main__":
    main()
