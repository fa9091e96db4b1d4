"""Measure one stream with and without speculation: output tokens a second, by kind of text.

Starts ``octavo up`` with speculation off and on in turn, ``--rounds`` times, and each time streams every text once
to warm up and ``--repeats`` times measured, one after the other. The time runs from the first token to the last.
The last line of stdout is one JSON object: the medians of tokens a second, their quotient, and the share of drafts
that were accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from scripts.octavo_under_test import cpu_model, running_octavo
from services.supervisor.ports import claim_port

_RECIPE = (
    "Take 200 g of flour, 100 g of butter and 50 g of sugar. Rub the butter into the flour, add the sugar, press "
    "the dough into a tin. Bake it at 180 degrees for 25 minutes, and let it cool in the tin before you cut it."
)
_TEXTS = {
    "repetition": "Count from 1 to 5 over and over: 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1,",
    "copy": f"Text:\n{_RECIPE}\n\nThe same text again, word by word:\n",
    "prose": "Once upon a time, in a village by the sea, there lived an old clockmaker who",
}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="starts of octavo up with each setting")
    parser.add_argument("--repeats", type=int, default=3, help="measured requests for each text and start")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--drafts", type=int, default=4, help="engine.num_draft_tokens")
    parser.add_argument("--set", action="append", default=[], help="a setting of octavo up, for both")
    options = parser.parse_args()
    rates: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in _TEXTS}
    counts = {"drafts": 0.0, "accepted": 0.0}
    for _ in range(options.rounds):
        for speculation in ("none", "ngram"):
            port = claim_port("127.0.0.1", 0)
            settings = [
                f"engine.speculation={speculation}",
                f"engine.num_draft_tokens={options.drafts}",
                f"engine.metrics_port={port}",
                *options.set,
            ]
            with running_octavo([flag for setting in settings for flag in ("--set", setting)]) as state:
                asyncio.run(_measure(state["base_url"], port, options, speculation, rates, counts))
    print(json.dumps(_result(options, rates, counts)))


async def _measure(
    base_url: str,
    metrics_port: int,
    options: argparse.Namespace,
    speculation: str,
    rates: dict[str, dict[str, list[float]]],
    counts: dict[str, float],
) -> None:
    async with aiohttp.ClientSession(base_url) as session:
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        for name, text in _TEXTS.items():
            for repeat in range(options.repeats + 1):
                rate = await _tokens_per_second(session, model, text, options.max_tokens)
                if repeat:
                    rates[name][speculation].append(rate)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{metrics_port}/metrics") as response,
    ):
        families = list(text_string_to_metric_families(await response.text()))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    counts["drafts"] += values["octavo_engine_draft_tokens_total"]
    counts["accepted"] += values["octavo_engine_accepted_draft_tokens_total"]


async def _tokens_per_second(session: aiohttp.ClientSession, model: str, text: str, max_tokens: int) -> float:
    """Stream one completion; the time runs from its first token to its last."""
    body = {
        "model": model,
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    arrivals: list[float] = []
    num_tokens: list[int] = []
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line.removeprefix(b"data: "))["choices"]
                token_ids = choices[0].get("token_ids") if choices else None
                if token_ids:
                    arrivals.append(time.monotonic())
                    num_tokens.append(len(token_ids))
    return (sum(num_tokens) - num_tokens[0]) / (arrivals[-1] - arrivals[0])


def _result(
    options: argparse.Namespace, rates: dict[str, dict[str, list[float]]], counts: dict[str, float]
) -> dict[str, Any]:
    medians = {
        name: {speculation: statistics.median(values) for speculation, values in by_setting.items()}
        for name, by_setting in rates.items()
    }
    return {
        "benchmark": "speculation",
        "options": vars(options),
        "machine": {"cpu": cpu_model(), "num_cores": os.cpu_count(), "python": platform.python_version()},
        "tokens_per_second": {
            name: {speculation: round(rate, 1) for speculation, rate in rates.items()}
            for name, rates in medians.items()
        },
        "speedup": {name: round(rates["ngram"] / rates["none"], 2) for name, rates in medians.items()},
        "draft_acceptance_rate": round(counts["accepted"] / counts["drafts"], 3) if counts["drafts"] else None,
        "raw_tokens_per_second": rates,
    }


if __name__ == "__main__":
    main()
