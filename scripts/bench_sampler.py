"""Time the choice of tokens for rows of logits, native and by the reference; one JSON object is the last line.

Rows of 49,152 normal values, spread wide as a model's are (``peaked``) or not (``flat``); everything that the
worker does between logits and token ids is timed. Times are the best of several, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from services.worker.kernels.cpu.extension import load_extension
from services.worker.kernels.cpu.sampler import NativeRowSampler
from services.worker.logits_processors import TokenHistory
from services.worker.row_sampler import Logits, ReferenceRowSampler, RowSampler
from services.worker.sampler import Sampler
from services.worker.step import SamplingParams

VOCAB_SIZE = 49_152
NUM_ROWS = (1, 8, 32, 64)
SPREADS = {"peaked": 4.0, "flat": 0.5}
_FILTERED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
SETTINGS: dict[str, dict[str, Any]] = {  # Any: parameters of several types.
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "and top_p 0.95": _FILTERED,
    "and top_k 50": _FILTERED | {"top_k": 50},
    "top_p and penalties": _FILTERED | {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "greedy with 5 logprobs": {"num_logprobs": 5},
}
_NUM_SEEN_TOKENS = 512
_BUDGET_SECONDS = 0.5
_MIN_REPEATS = 3


def main() -> None:
    """Print a table for each spread, then the JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reference", action="store_true", help="time the reference in numpy as well")
    arguments = parser.parse_args()
    extension = load_extension()
    assert extension is not None, "the kernels are not built: python -m services.worker.kernels.cpu.build"
    row_samplers: dict[str, RowSampler] = {
        "native": NativeRowSampler(extension, vocab_size=VOCAB_SIZE, num_threads=arguments.threads)
    }
    if arguments.reference:
        row_samplers["reference"] = ReferenceRowSampler()
    results = [
        {
            "by": by,
            "spread": spread,
            "rows": num_rows,
            "settings": name,
            "ms": _best_ms(sampler, spread, num_rows, name),
        }
        for by, sampler in row_samplers.items()
        for spread in SPREADS
        for name in SETTINGS
        for num_rows in NUM_ROWS
    ]
    for result in results:
        print("{by:10} {spread:7} {settings:24} {rows:3} rows {ms:9.3f} ms".format_map(result))
    print(json.dumps({"threads": arguments.threads, "vocab_size": VOCAB_SIZE, "results": results}))


def _best_ms(row_sampler: RowSampler, spread: str, num_rows: int, settings: str) -> float:
    random = np.random.default_rng(0)
    logits: Logits = (random.normal(size=(num_rows, VOCAB_SIZE)) * SPREADS[spread]).astype(np.float32)
    sampler = Sampler(max_num_seqs=num_rows, vocab_size=VOCAB_SIZE, eos_token_ids=[2], row_sampler=row_sampler)
    histories: dict[int, TokenHistory] = {}
    for row in range(num_rows):
        sampler.add(row, SamplingParams(seed=row, **SETTINGS[settings]), 0)
        if sampler.needs_history(row):
            seen = random.integers(0, VOCAB_SIZE, _NUM_SEEN_TOKENS).astype(np.int32)
            histories[row] = TokenHistory(seen, _NUM_SEEN_TOKENS // 2)
    times: list[float] = []
    while len(times) < _MIN_REPEATS or sum(times) < _BUDGET_SECONDS:
        started = time.perf_counter()
        sampler.sample(logits, np.arange(num_rows), np.full(num_rows, len(times)), histories)
        times.append(time.perf_counter() - started)
    return round(min(times) * 1e3, 4)


if __name__ == "__main__":
    main()
