"""Compare the core's policies on one seeded trace, with a virtual clock: no model, no wire, no waiting.

The workload is the one of the project's target scale: prompts of 1,000 and outputs of 400 tokens on average, both
log-normal, from four tenants that differ in their output lengths; every request allows 1,024 output tokens, so that
lengths are not known in advance. Policies: paged blocks with admission by predicted peak (the default) and by a
watermark, contiguous pre-allocation, and static batching. A step's time is ``constant + per_token · tokens +
per_read · cached tokens read``, by default as measured with SmolLM2 on two cores.

KV waste is the share of allocated token slots that hold no computed token, averaged over steps. The last line is
one JSON object with the counts of each policy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.engine.core.request import Request, SequenceEnd, StopCriteria
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import Admission, Batching, Layout, SchedulerConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepResult

_EOS, _TOKEN_ID = 2, 77
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 8192
_MAX_OUTPUT_TOKENS = 1024

_BASE = SchedulerConfig(
    num_blocks=2048,
    block_size=_BLOCK_SIZE,
    max_model_len=_MAX_MODEL_LEN,
    max_num_seqs=256,
    max_num_batched_tokens=512,
    max_waiting_sequences=100_000,
    eos_token_ids=(_EOS,),
    max_steps_in_flight=1,
)
_POLICIES = {
    "paged_predicted_peak": _BASE,
    "paged_watermark": replace(_BASE, admission=Admission.WATERMARK),
    "contiguous": replace(_BASE, layout=Layout.CONTIGUOUS),
    # A static batch is what joins in one step: with a small budget it would be small, too.
    "static": replace(_BASE, batching=Batching.STATIC, max_num_batched_tokens=32_768, max_prefill_share=1.0),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the trace; ``num_output_tokens`` is where its end token comes."""

    time_seconds: float
    tenant_id: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step costs, in seconds."""

    constant: float
    per_token: float
    per_read: float
    per_pair: float = 0.0

    def of(self, output: SchedulerOutput) -> float:
        """Return a step's time."""
        work = output.work
        reads, pairs = self.per_read * work.decode_context_tokens, self.per_pair * work.prefill_pairs
        return self.constant + self.per_token * work.num_tokens + reads + pairs


def main() -> None:
    """Run all policies on the same trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--constant", type=float, default=0.006, help="seconds of any step")
    parser.add_argument("--per-token", type=float, default=0.0005, help="seconds of a computed token")
    parser.add_argument("--per-read", type=float, default=3e-7, help="seconds of a cached token read")
    options = parser.parse_args()
    trace = make_trace(options.requests, options.rate, options.seed)
    times = StepTimes(options.constant, options.per_token, options.per_read)
    result: dict[str, Any] = {
        "num_requests": len(trace),
        "num_prompt_tokens": sum(arrival.num_prompt_tokens for arrival in trace),
        "num_output_tokens": sum(arrival.num_output_tokens for arrival in trace),
        "num_blocks": _BASE.num_blocks,
        "policies": {name: simulate(config, trace, times) for name, config in _POLICIES.items()},
    }
    print(json.dumps(result))


def make_trace(num_requests: int, rate: float, seed: int) -> list[Arrival]:
    """Draw the trace: Poisson arrivals, log-normal lengths."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, num_requests))
    prompts = np.clip(random.lognormal(np.log(1000) - 0.125, 0.5, num_requests), 16, 4000).astype(int)
    tenants = random.integers(0, 4, num_requests)
    means = np.array([100, 300, 500, 700])[tenants]
    outputs = np.clip(random.lognormal(np.log(means) - 0.045, 0.3), 1, _MAX_OUTPUT_TOKENS).astype(int)
    return [
        Arrival(float(time), f"tenant-{tenant}", int(prompt), int(output))
        for time, tenant, prompt, output in zip(arrivals, tenants, prompts, outputs, strict=True)
    ]


def simulate(config: SchedulerConfig, trace: list[Arrival], times: StepTimes) -> dict[str, Any]:
    """Run one policy until every request has ended."""
    scheduler = Scheduler(config)
    random = np.random.default_rng(1)
    now, next_arrival = 0.0, 0
    remaining: dict[int, int] = {}
    arrived: dict[int, float] = {}
    ttfts: list[float] = []
    waste: list[float] = []
    ends: list[SequenceEnd] = []
    num_steps = num_computed = 0
    while len(ends) < len(trace):
        while next_arrival < len(trace) and trace[next_arrival].time_seconds <= now:
            arrival = trace[next_arrival]
            prompt = random.integers(10, 40_000, arrival.num_prompt_tokens).astype(np.uint32)
            [handle] = scheduler.add(
                Request(
                    request_id=str(next_arrival),
                    owner=0,
                    tenant_id=arrival.tenant_id,
                    prompt_token_ids=prompt,
                    stop_criteria=StopCriteria(max_output_tokens=_MAX_OUTPUT_TOKENS),
                    sampling_params=None,
                ),
                now,
            )
            remaining[handle], arrived[handle] = arrival.num_output_tokens, arrival.time_seconds
            next_arrival += 1
        output = scheduler.schedule(now)
        if output is None:
            now = trace[next_arrival].time_seconds
            continue
        usage = scheduler.kv_usage
        waste.append(1 - usage.num_computed_tokens / usage.num_allocated_tokens)
        step_seconds = times.of(output)
        now += step_seconds
        num_steps += 1
        num_computed += output.num_tokens
        handles = output.handles[output.is_sampled].tolist()
        tokens = [_EOS if remaining[handle] == 1 else _TOKEN_ID for handle in handles]
        slots = output.slots[output.is_sampled]
        events = scheduler.apply(
            StepResult(output.step_id, slots, np.ones_like(slots), np.array(tokens, np.uint32), (), step_seconds),
            now,
        )
        for handle in events.handles.tolist():
            remaining[handle] -= 1
            if handle in arrived:
                ttfts.append(now - arrived.pop(handle))
        ends += events.ends
    num_output = sum(end.usage.num_output_tokens for end in ends)
    return {
        "seconds": now,
        "num_steps": num_steps,
        "num_output_tokens": num_output,
        "output_tokens_per_second": num_output / now,
        "num_computed_tokens": num_computed,
        "num_preemptions": sum(end.usage.num_preemptions for end in ends),
        "ttft_p50_seconds": statistics.median(ttfts),
        "ttft_p99_seconds": statistics.quantiles(ttfts, n=100)[98],
        "kv_waste_mean": statistics.fmean(waste),
    }


if __name__ == "__main__":
    main()
