"""Time the engine's core: a step's schedule and apply, by the number of running sequences. No model, no wire.

Decode: every sequence computes one token. Mixed: the same, and in each step one sequence ends and one of 512
prompt tokens joins. Waiting: the decode step with 1,024 running and 10,000 in line behind them against none. Also
memory and start time of a core with 10,000 requests and a million blocks, in a process of its own. The last line is
one JSON object with raw durations.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from services.engine.core.request import Request, StopCriteria
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import Admission, SchedulerConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepResult

_REPOSITORY = Path(__file__).resolve().parent.parent
_BLOCK_SIZE = 16
_NUM_SEQUENCES = (64, 256, 1024, 4096)
_TOKEN_ID = 77


class Bench:
    """A scheduler and a worker that takes no time."""

    def __init__(self, num_sequences: int, *, max_model_len: int = 2048, num_blocks: int | None = None) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks or (num_sequences + 64) * max_model_len // _BLOCK_SIZE,
                block_size=_BLOCK_SIZE,
                max_model_len=max_model_len,
                max_num_seqs=num_sequences,
                max_num_batched_tokens=num_sequences + 2048,
                max_waiting_sequences=20_000,
                eos_token_ids=(2,),
                # A step is timed whole: what may overlap is not taken off.
                max_steps_in_flight=1,
                admission=Admission.PREDICTED_PEAK,
            )
        )
        self._random = np.random.default_rng(0)
        self._num_requests = 0

    def add(self, num_prompt_tokens: int, max_output_tokens: int) -> None:
        """Add a request with a prompt of its own."""
        self._num_requests += 1
        self.scheduler.add(
            Request(
                request_id=str(self._num_requests),
                owner=self._num_requests % 4,
                prompt_token_ids=self._random.integers(10, 40_000, num_prompt_tokens).astype(np.uint32),
                stop_criteria=StopCriteria(max_output_tokens=max_output_tokens),
                sampling_params=None,
            ),
            0.0,
        )

    def step(self) -> tuple[float, SchedulerOutput]:
        """Run a step; returns the seconds spent in schedule and apply."""
        started = time.perf_counter()
        output = self.scheduler.schedule(0.0)
        scheduled = time.perf_counter() - started
        assert output is not None
        slots = output.slots[output.is_sampled]
        num_tokens, token_ids = np.ones(len(slots), np.int64), np.full(len(slots), _TOKEN_ID, np.uint32)
        result = StepResult(output.step_id, slots, num_tokens, token_ids, (), 0.01)
        started = time.perf_counter()
        self.scheduler.apply(result, 0.0)
        return scheduled + time.perf_counter() - started, output

    def run_until_all_decode(self, num_sequences: int) -> None:
        """Step until every sequence computes one token."""
        while self.step()[1].num_tokens != num_sequences or self.scheduler.load.num_running != num_sequences:
            pass


def main() -> None:
    """Run all and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="timed steps of each case")
    parser.add_argument("--large-core-only", action="store_true", help="only memory and start time")
    options = parser.parse_args()
    if options.large_core_only:
        print(json.dumps(large_core()))
        return
    gc.disable()
    decode = {str(count): decode_steps(count, options.steps) for count in _NUM_SEQUENCES}
    mixed = {str(count): mixed_steps(count, options.steps) for count in _NUM_SEQUENCES}
    alone, in_line = waiting_steps(options.steps)
    result = {
        "decode_us_per_seq": {count: per_sequence(seconds, int(count)) for count, seconds in decode.items()},
        "mixed_us_per_seq": {count: per_sequence(seconds, int(count)) for count, seconds in mixed.items()},
        "waiting_growth": statistics.median(in_line) / statistics.median(alone),
        "decode_step_seconds_mean": {count: statistics.fmean(seconds) for count, seconds in decode.items()},
        "mixed_step_seconds_mean": {count: statistics.fmean(seconds) for count, seconds in mixed.items()},
        "waiting_step_seconds_median": {"0": statistics.median(alone), "10000": statistics.median(in_line)},
        "num_timed_steps": options.steps,
        "large_core": json.loads(
            subprocess.check_output(
                [sys.executable, "-m", "scripts.bench_scheduler", "--large-core-only"], cwd=_REPOSITORY
            )
        ),
        "machine": {"processor": platform.processor() or platform.machine(), "python": sys.version.split()[0]},
    }
    print(json.dumps(result))


def decode_steps(num_sequences: int, num_steps: int) -> list[float]:
    """Return the seconds of steady decode steps."""
    bench = Bench(num_sequences)
    for index in range(num_sequences):
        # Different lengths, so that block borders are crossed evenly over the steps.
        bench.add(32 + index % _BLOCK_SIZE, num_steps + 200)
    bench.run_until_all_decode(num_sequences)
    return [bench.step()[0] for _ in range(num_steps)]


def mixed_steps(num_sequences: int, num_steps: int) -> list[float]:
    """Return the seconds of steps in which one sequence ends and one joins."""
    bench = Bench(num_sequences, max_model_len=8192, num_blocks=(num_sequences + 64) * 300)
    for index in range(num_sequences):
        bench.add(32 + index % _BLOCK_SIZE, 100 + index)
    bench.run_until_all_decode(num_sequences)
    seconds: list[float] = []
    while len(seconds) < num_steps:
        bench.add(512, num_sequences)
        seconds.append(bench.step()[0])
    return seconds


def waiting_steps(num_steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of decode steps with nobody in line, and with 10,000."""
    num_sequences = 1024
    bench = Bench(num_sequences)
    for index in range(num_sequences):
        bench.add(32 + index % _BLOCK_SIZE, 2 * num_steps + 200)
    bench.run_until_all_decode(num_sequences)
    alone = [bench.step()[0] for _ in range(num_steps)]
    for _ in range(10_000):
        bench.add(64, 100)
    return alone, [bench.step()[0] for _ in range(num_steps)]


def large_core() -> dict[str, Any]:
    """Return memory and start time of a core with a million blocks and 10,000 requests, 4,096 of them running."""
    before = _rss_bytes()
    started = time.perf_counter()
    bench = Bench(4096, max_model_len=8192, num_blocks=1_000_000)
    start_seconds = time.perf_counter() - started
    after_start = _rss_bytes()
    for _ in range(10_000):
        bench.add(512, 64)
    for _ in range(100):
        bench.step()
    load = bench.scheduler.load
    return {
        "num_blocks": load.num_blocks,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "start_seconds": start_seconds,
        "start_rss_bytes": max(0, after_start - before),
        "loaded_rss_bytes": max(0, _rss_bytes() - before),
    }


def per_sequence(seconds: list[float], num_sequences: int) -> float:
    """Return the mean in microseconds a sequence."""
    return statistics.fmean(seconds) * 1e6 / num_sequences


def _rss_bytes() -> int:
    # Not ru_maxrss: a child process inherits its parent's.
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
