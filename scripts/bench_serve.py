"""Measure a server over HTTP under an outside client, alone or in turns with another; prints one JSON object last.

``make bench-serve`` starts ``octavo up``; ``BASE=http://…`` measures a server that runs. ``VS=http://…`` (or one
of ``vllm``, ``llama.cpp-bf16`` and ``llama.cpp-q8_0``, which start these servers with the same weights) measures
another in the same run: both are asked the same requests in turns, first one and then the other, the order
reversed in each round. The client is ``vllm bench serve`` in an environment of its own
(``scripts.bench_client``); where that cannot be had, ``scripts.load_client`` sends the same kind of load, and the
result says so. Ratios above 1 are for BASE: more tokens a second, less time to wait.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from libs.text import EMBEDDED_MODEL_NAME, load_model_text, resolve_model_path
from scripts.bench_client import ClientUnavailable, VllmClient, running_client
from scripts.export_model import export_model
from scripts.llama_cpp_under_test import running_llama_cpp
from scripts.load_client import LoadClient, Prompt, PromptMaker, percentile_ms, summary
from scripts.octavo_under_test import REPOSITORY, cpu_model, running_octavo
from scripts.server_processes import ServerProcesses, share_of_python_tiers, spent
from scripts.vllm_under_test import running_vllm

_TIMEOUT_SECONDS = 3_600.0
_ANSWER_TIMEOUT_SECONDS = 30.0
_LLAMA_CPP = "llama.cpp-"
_RATIOS = {
    # Figure, and whether more of it is better.
    "output_tokens_per_second": True,
    "ttft_p50_ms": False,
    "ttft_p99_ms": False,
    "itl_p50_ms": False,
    "itl_p99_ms": False,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of load: prompts of random text behind a beginning that all share."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    concurrency: int
    num_requests: int
    num_shared_tokens: int = 0


WORKLOADS = (
    Workload("128/128 at 1", 128, 128, concurrency=1, num_requests=6),
    Workload("128/128 at 8", 128, 128, concurrency=8, num_requests=32),
    Workload("128/128 at 32", 128, 128, concurrency=32, num_requests=96),
    Workload("1000/100 at 8", 1_000, 100, concurrency=8, num_requests=24),
    Workload("900 shared + 64/64 at 8", 64, 64, concurrency=8, num_requests=48, num_shared_tokens=900),
)


class Client(Protocol):
    """Sends a workload to a server and gives its figures."""

    def run(self, base_url: str, workload: Workload, seed: int) -> dict[str, Any]:
        """Send all requests; the seed decides their texts."""
        ...


class OutsideClient:
    """``vllm bench serve``."""

    def __init__(self, client: VllmClient, tokenizer: Path) -> None:
        self._client = client
        self._tokenizer = tokenizer

    def run(self, base_url: str, workload: Workload, seed: int) -> dict[str, Any]:
        """Send all requests; the seed decides their texts."""
        flags: dict[str, object] = {
            "backend": "openai-chat",
            "endpoint": "/v1/chat/completions",
            "base-url": base_url,
            "model": _model_name(base_url),
            "tokenizer": self._tokenizer,
            "dataset-name": "random",
            "random-input-len": workload.num_prompt_tokens,
            "random-prefix-len": workload.num_shared_tokens,
            "random-output-len": workload.num_output_tokens,
            "num-prompts": workload.num_requests,
            "max-concurrency": workload.concurrency,
            "temperature": 0,
            "seed": seed,
        }
        named = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
        result = self._client.run([*named, "--ignore-eos", "--disable-tqdm", "--save-detailed"])
        # The client takes the first message of a stream for a token; one that only names a role comes with it.
        gaps = list(itertools.chain.from_iterable(result["itls"]))
        return {
            "num_requests": workload.num_requests,
            "num_failed": result["failed"],
            "num_prompt_tokens": result["total_input_tokens"],
            "num_output_tokens": result["total_output_tokens"],
            "duration_seconds": round(result["duration"], 3),
            "output_tokens_per_second": round(result["output_throughput"], 2),
            "ttft_p50_ms": percentile_ms(result["ttfts"], 50),
            "ttft_p99_ms": percentile_ms(result["ttfts"], 99),
            "itl_p50_ms": percentile_ms(gaps, 50),
            "itl_p99_ms": percentile_ms(gaps, 99),
        }


class OwnClient:
    """``scripts.load_client``."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = load_model_text(model).tokenizer

    def run(self, base_url: str, workload: Workload, seed: int) -> dict[str, Any]:
        """Send all requests; the seed decides their texts."""
        maker = PromptMaker(self._tokenizer, seed)
        shared = maker.words(workload.num_shared_tokens)
        prompts = [
            Prompt(shared + maker.words(workload.num_prompt_tokens), workload.num_output_tokens)
            for _ in range(workload.num_requests)
        ]
        return asyncio.run(self._run(base_url, prompts, workload.concurrency))

    async def _run(self, base_url: str, prompts: list[Prompt], concurrency: int) -> dict[str, Any]:
        client = await LoadClient.connect(base_url)
        try:
            started = time.perf_counter()
            streams = await client.send_closed(prompts, concurrency)
            return summary(streams, time.perf_counter() - started)
        finally:
            await client.close()


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test."""

    name: str
    base_url: str
    # Both from the start of its process; None when it ran already.
    seconds_to_ready: float | None = None
    seconds_to_first_answer: float | None = None


def main() -> None:
    """Run the benchmark."""
    options = _options()
    model = resolve_model_path(options.model)
    folder = export_model(model, REPOSITORY / "build" / "bench-model")
    workloads = [workload for workload in WORKLOADS if options.only in workload.name]
    with ExitStack() as stack:
        client_name, client = _client(stack, options.client, folder, model)
        servers = [stack.enter_context(_octavo(options))]
        if options.vs:
            servers.append(stack.enter_context(_other(options.vs, folder, model)))
        runs = list(_measure(client, servers, workloads, options.rounds))
    result = {
        "benchmark": "serve",
        "client": client_name,
        "machine": {"cpu": cpu_model(), "num_cores": os.cpu_count(), "python": platform.python_version()},
        "servers": [asdict(server) for server in servers],
        "workloads": [asdict(workload) for workload in workloads],
        "runs": runs,
    }
    if len(servers) > 1:
        result["ratios"] = {workload.name: _ratios(runs, workload.name) for workload in workloads}
    print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="URL of the server to measure; empty starts octavo up")
    parser.add_argument(
        "--vs", default="", help="URL of a server to compare with, or vllm, llama.cpp-bf16, llama.cpp-q8_0"
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL_NAME, help="as --model of octavo up; a GGUF file")
    parser.add_argument("--set", action="append", default=[], help="passed to octavo up")
    parser.add_argument("--client", choices=("auto", "vllm", "own"), default="auto")
    parser.add_argument("--rounds", type=int, default=2, help="times that each workload is sent to each server")
    parser.add_argument("--only", default="", help="only workloads whose names have this in them")
    return parser.parse_args()


def _client(stack: ExitStack, choice: str, folder: Path, model: Path) -> tuple[str, Client]:
    if choice != "own":
        try:
            log = REPOSITORY / "build" / "bench-client.log"
            return "vllm bench serve", OutsideClient(
                stack.enter_context(running_client(_TIMEOUT_SECONDS, log)), folder
            )
        except ClientUnavailable as error:
            if choice == "vllm":
                sys.exit(str(error))
            print(f"The outside client is not to be had, so our own sends the load: {error}", file=sys.stderr)
    return "scripts.load_client", OwnClient(model)


@contextmanager
def _octavo(options: argparse.Namespace) -> Iterator[Server]:
    if options.base:
        yield Server("base", options.base.rstrip("/"))
        return
    flags = ["--model", options.model, *(part for value in options.set for part in ("--set", value))]
    started = time.monotonic()
    with running_octavo(flags) as state:
        yield _started("base", state["base_url"], started)


@contextmanager
def _other(vs: str, folder: Path, model: Path) -> Iterator[Server]:
    if vs == "vllm":
        other = running_vllm(folder, served_model_name=model.stem)
    elif vs.startswith(_LLAMA_CPP):
        other = running_llama_cpp(model, vs.removeprefix(_LLAMA_CPP))
    else:
        yield Server("vs", vs.rstrip("/"))
        return
    started = time.monotonic()
    with other as base_url:
        yield _started("vs", base_url, started)


def _started(name: str, base_url: str, started: float) -> Server:
    """Ask a server that has just become ready for its first token; ``started`` is when its process began."""
    ready_at = time.monotonic()
    message = {"role": "user", "content": "Hello"}
    body = {"model": _model_name(base_url), "messages": [message], "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_SECONDS) as response:
        response.read()
    return Server(name, base_url, round(ready_at - started, 2), round(time.monotonic() - started, 2))


def _model_name(base_url: str) -> str:
    with urllib.request.urlopen(f"{base_url}/v1/models", timeout=_ANSWER_TIMEOUT_SECONDS) as response:
        name: str = json.load(response)["data"][0]["id"]
        return name


def _measure(
    client: Client, servers: list[Server], workloads: list[Workload], rounds: int
) -> Iterator[dict[str, Any]]:
    processes = {server.name: ServerProcesses(server.base_url) for server in servers}
    for server in servers:
        # Paths that a server compiles or loads at first use are not what is measured.
        client.run(server.base_url, Workload("warm-up", 32, 8, concurrency=2, num_requests=2), seed=999)
    for index, workload in enumerate(workloads):
        for number in range(rounds):
            # Other texts in each round of each workload, so that none finds the prompts of another cached.
            seed = index * rounds + number
            for server in servers if number % 2 == 0 else servers[::-1]:
                before = processes[server.name].cpu_seconds()
                figures = client.run(server.base_url, workload, seed=seed)
                cpu_seconds = spent(before, processes[server.name].cpu_seconds())
                print(f"{workload.name}, {server.name}, round {number}: {json.dumps(figures)}", flush=True)
                yield {
                    "workload": workload.name,
                    "server": server.name,
                    "round": number,
                    **figures,
                    "cpu_seconds": cpu_seconds,
                    "python_tiers_share": share_of_python_tiers(cpu_seconds),
                }


def _ratios(runs: list[dict[str, Any]], workload: str) -> dict[str, float | None]:
    """Compare means over rounds; above 1 is for BASE."""

    def mean(server: str, figure: str) -> float:
        values = [run[figure] for run in runs if run["workload"] == workload and run["server"] == server]
        return float(statistics.mean(values))

    ratios: dict[str, float | None] = {}
    for figure, is_more_better in _RATIOS.items():
        base, other = mean("base", figure), mean("vs", figure)
        above, below = (base, other) if is_more_better else (other, base)
        ratios[figure] = round(above / below, 3) if below else None
    return ratios


if __name__ == "__main__":
    main()
