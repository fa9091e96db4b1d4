"""Measure one stream with and without speculation: output tokens a second, by kind of text.

Runs two ``octavo up`` beside each other, one that speculates and one that does not, and streams each text from both
in turn, once to warm up and ``--repeats`` times measured. One request is open at any time, so that what else the
machine does disturbs both alike. The time runs from the first token to the last. The last line of stdout is one
JSON object: the medians of tokens a second and of the quotient of two neighbours, and the share of drafts accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from scripts.octavo_under_test import cpu_model, running_octavo
from services.supervisor.ports import claim_port

_MODEL = "smollm2-135m-instruct"
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
    parser.add_argument("--repeats", type=int, default=7, help="measured requests for each text and setting")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--drafts", type=int, default=4, help="engine.num_draft_tokens")
    parser.add_argument("--set", action="append", default=[], help="a setting of octavo up, for both")
    options = parser.parse_args()
    port = claim_port("127.0.0.1", 0)
    # A small cache is resident soon: filling a large one would take time from what is measured.
    shared = ["worker.kv_cache_memory=128MiB", *options.set]
    speculating = [
        "engine.speculation=ngram",
        f"engine.num_draft_tokens={options.drafts}",
        f"engine.metrics_port={port}",
    ]
    with running_octavo(_flags(shared)) as plain, running_octavo(_flags([*shared, *speculating])) as ngram:
        result = asyncio.run(_measure(plain["base_url"], ngram["base_url"], port, options))
    print(json.dumps(result))


def _flags(settings: list[str]) -> list[str]:
    return [flag for setting in settings for flag in ("--set", setting)]


async def _measure(
    plain_url: str, ngram_url: str, metrics_port: int, options: argparse.Namespace
) -> dict[str, Any]:
    rates: dict[str, dict[str, list[float]]] = {name: {"none": [], "ngram": []} for name in _TEXTS}
    async with aiohttp.ClientSession(plain_url) as plain, aiohttp.ClientSession(ngram_url) as ngram:
        for name, text in _TEXTS.items():
            for repeat in range(options.repeats + 1):
                for speculation, session in (("none", plain), ("ngram", ngram)):
                    rate = await _tokens_per_second(session, text, options.max_tokens)
                    if repeat:
                        rates[name][speculation].append(rate)
        async with ngram.get(f"http://127.0.0.1:{metrics_port}/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    num_accepted = values["octavo_engine_accepted_draft_tokens_total"]
    return _result(options, rates, num_accepted / max(1.0, values["octavo_engine_draft_tokens_total"]))


async def _tokens_per_second(session: aiohttp.ClientSession, text: str, max_tokens: int) -> float:
    """Stream one completion; the time runs from its first token to its last."""
    body = {
        "model": _MODEL,
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
    options: argparse.Namespace, rates: dict[str, dict[str, list[float]]], acceptance_rate: float
) -> dict[str, Any]:
    return {
        "benchmark": "speculation",
        "options": vars(options),
        "machine": {"cpu": cpu_model(), "num_cores": os.cpu_count(), "python": platform.python_version()},
        "tokens_per_second": {
            name: {speculation: round(statistics.median(values), 1) for speculation, values in by_setting.items()}
            for name, by_setting in rates.items()
        },
        "speedup": {
            name: round(
                statistics.median(
                    ngram / none for none, ngram in zip(by_setting["none"], by_setting["ngram"], strict=True)
                ),
                2,
            )
            for name, by_setting in rates.items()
        },
        "draft_acceptance_rate": round(acceptance_rate, 3),
        "raw_tokens_per_second": rates,
    }


if __name__ == "__main__":
    main()
