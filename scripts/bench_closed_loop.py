"""Simulate clients that each send the next request when the last is answered: the scheduler's core alone.

Time is virtual, so that policies can be compared to a few per cent where a machine's noise hides them. The
workloads are those of ``make bench-serve``. A step's time is ``constant + per_token · tokens + per_read · cached
tokens read + per_pair · pairs of prompt token and context``, by default as SmolLM2 in bf16 has it on two cores of a
Xeon with AMX, and some per cent more or less at random; two steps are in flight. A request is on its way to the
engine for ``--delay``, after a gateway that takes some milliseconds for each, one after the other. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from scripts.bench_policies import StepTimes
from scripts.bench_serve import WORKLOADS, Workload
from scripts.load_client import percentile_ms
from services.engine.core.request import Request, StopCriteria
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import SchedulerConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepResult

_TOKEN_ID = 77
CONFIG = SchedulerConfig(
    num_blocks=8192,
    block_size=16,
    max_model_len=8192,
    max_num_seqs=256,
    max_num_batched_tokens=512,
    max_waiting_sequences=10_000,
    eos_token_ids=(2,),
    max_steps_in_flight=2,
)
# How much longer or shorter than expected a step takes, and how long an answer is under way to the engine.
_STEP_NOISE = (0.92, 1.15)
_ANSWER_SECONDS = 0.0025
# What a gateway takes for a request, and a client from the end of one answer to the next question.
_GATEWAY_SECONDS = (0.002, 0.005)
_CLIENT_SECONDS = 0.004
# No two prompts of a workload are quite alike.
_LENGTH_SPREAD = 3


class ClosedLoop:
    """One run of one workload."""

    def __init__(
        self, config: SchedulerConfig, load: Workload, times: StepTimes, delay_seconds: float, seed: int
    ) -> None:
        self._load = load
        self._times = times
        self._delay_seconds = delay_seconds
        self._scheduler = Scheduler(config)
        self._random = random.Random(seed)
        self._tokens = np.random.default_rng(seed)
        self._shared = self._tokens.integers(10, 40_000, load.num_shared_tokens).astype(np.uint32)
        self._now = 0.0
        self._num_sent = 0
        self._gateway_free_at = self._worker_free_at = 0.0
        # Arrivals at the engine: when, which, and when the client sent it.
        self._arrivals: list[tuple[float, int, float]] = []
        # Steps that are computed: when the engine has the answer, and what it took.
        self._steps: deque[tuple[float, SchedulerOutput, float]] = deque()
        self._sent_at: dict[int, float] = {}
        self._last_at: dict[int, float] = {}
        self.ttfts: list[float] = []
        self.gaps: list[float] = []
        self.num_tokens = 0

    def run(self) -> float:
        """Run until all are answered; returns the seconds that took."""
        for _ in range(self._load.concurrency):
            self._send(0.0)
        while self._arrivals or self._steps:
            if self._steps and (not self._arrivals or self._steps[0][0] <= self._arrivals[0][0]):
                self._take_answer()
            else:
                self._take_request()
            self._fill_pipeline()
        return self._now

    def _send(self, now: float) -> None:
        if self._num_sent == self._load.num_requests:
            return
        self._gateway_free_at = max(self._gateway_free_at, now) + self._random.uniform(*_GATEWAY_SECONDS)
        heapq.heappush(self._arrivals, (self._gateway_free_at + self._delay_seconds, self._num_sent, now))
        self._num_sent += 1

    def _take_request(self) -> None:
        self._now, number, sent_at = heapq.heappop(self._arrivals)
        num_own = self._load.num_prompt_tokens + self._random.randint(-_LENGTH_SPREAD, _LENGTH_SPREAD)
        own = self._tokens.integers(10, 40_000, num_own).astype(np.uint32)
        [handle] = self._scheduler.add(
            Request(
                request_id=str(number),
                owner=0,
                prompt_token_ids=np.concatenate((self._shared, own)),
                stop_criteria=StopCriteria(max_output_tokens=self._load.num_output_tokens, ignore_eos=True),
                sampling_params=None,
            ),
            self._now,
        )
        self._sent_at[handle] = sent_at

    def _take_answer(self) -> None:
        self._now, output, step_seconds = self._steps.popleft()
        slots = output.slots[output.is_sampled]
        token_ids = np.full(len(slots), _TOKEN_ID, np.uint32)
        result = StepResult(output.step_id, slots, np.ones_like(slots), token_ids, (), step_seconds)
        events = self._scheduler.apply(result, self._now)
        for handle in events.handles.tolist():
            self.num_tokens += 1
            sent_at = self._sent_at.pop(handle, None)
            if sent_at is None:
                self.gaps.append(self._now - self._last_at[handle])
            else:
                self.ttfts.append(self._now - sent_at)
            self._last_at[handle] = self._now
        for _ in events.ends:
            self._send(self._now + _CLIENT_SECONDS)

    def _fill_pipeline(self) -> None:
        while self._scheduler.can_schedule and (output := self._scheduler.schedule(self._now)) is not None:
            step_seconds = self._times.of(output) * self._random.uniform(*_STEP_NOISE)
            self._worker_free_at = max(self._now, self._worker_free_at) + step_seconds
            self._steps.append((self._worker_free_at + _ANSWER_SECONDS, output, step_seconds))


def main() -> None:
    """Simulate all workloads with some settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=int, default=CONFIG.max_num_batched_tokens, help="tokens of a step")
    parser.add_argument("--share", type=float, default=CONFIG.max_prefill_share, help="max_prefill_share")
    parser.add_argument("--seeds", type=int, default=6, help="runs of each workload")
    parser.add_argument("--delay", type=float, default=0.008, help="seconds from the gateway to the engine")
    parser.add_argument("--constant", type=float, default=0.0115, help="seconds of any step")
    parser.add_argument("--per-token", type=float, default=1.27e-4, help="seconds of a computed token")
    parser.add_argument("--per-read", type=float, default=1.1e-6, help="seconds of a cached token read")
    parser.add_argument(
        "--per-pair", type=float, default=9.4e-8, help="seconds of a prompt token and one before it"
    )
    options = parser.parse_args()
    config = replace(CONFIG, max_num_batched_tokens=options.budget, max_prefill_share=options.share)
    times = StepTimes(options.constant, options.per_token, options.per_read, options.per_pair)
    loads = [simulate(config, load, times, options.delay, options.seeds) for load in WORKLOADS]
    print(json.dumps({"benchmark": "closed_loop", "options": vars(options), "loads": loads}))


def simulate(
    config: SchedulerConfig, load: Workload, times: StepTimes, delay_seconds: float, num_seeds: int
) -> dict[str, Any]:
    """Run one workload with several seeds."""
    runs = [ClosedLoop(config, load, times, delay_seconds, seed) for seed in range(num_seeds)]
    seconds = [run.run() for run in runs]
    ttfts = [ttft for run in runs for ttft in run.ttfts]
    gaps = [gap for run in runs for gap in run.gaps]
    return {
        "name": load.name,
        "num_requests": len(ttfts),
        "num_output_tokens": sum(run.num_tokens for run in runs),
        "seconds": round(sum(seconds), 3),
        "output_tokens_per_second": round(sum(run.num_tokens for run in runs) / sum(seconds), 1),
        "ttft_p50_ms": percentile_ms(ttfts, 50),
        "ttft_mean_ms": round(statistics.fmean(ttfts) * 1e3, 2),
        "ttft_p90_ms": percentile_ms(ttfts, 90),
        "itl_p50_ms": percentile_ms(gaps, 50),
        "itl_p99_ms": percentile_ms(gaps, 99),
    }


if __name__ == "__main__":
    main()
