"""The simulated closed loop: everybody is answered, and times are those that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.bench_closed_loop import CONFIG, ClosedLoop, simulate
from scripts.bench_policies import StepTimes
from scripts.bench_serve import WORKLOADS, Workload

TIMES = StepTimes(constant=0.01, per_token=1e-4, per_read=0.0, per_pair=0.0)


@pytest.mark.parametrize("load", WORKLOADS, ids=lambda load: load.name)
def test_everybody_is_answered_in_full(load: Workload) -> None:
    small = replace(load, num_output_tokens=4, num_requests=load.concurrency + 3)

    figures = simulate(CONFIG, small, TIMES, 0.008, num_seeds=1)

    assert figures["num_requests"] == small.num_requests
    assert figures["num_output_tokens"] == 4 * small.num_requests


def test_a_client_alone_waits_for_its_own_prompt_only() -> None:
    loop = ClosedLoop(CONFIG, Workload("alone", 100, 2, concurrency=1, num_requests=1), TIMES, 0.008, seed=0)

    seconds = loop.run()

    # A step of about 20 ms, and at most 5 ms of gateway, 8 ms of way and 2.5 ms for the answer.
    [ttft] = loop.ttfts
    assert 0.0194 * 0.92 + 0.0125 < ttft < 0.0204 * 1.15 + 0.0155
    [gap] = loop.gaps
    assert ttft + gap == pytest.approx(seconds)


def test_prompts_one_after_the_other_have_their_first_tokens_sooner_in_the_mean() -> None:
    load = Workload("long", 500, 2, concurrency=4, num_requests=4)

    short_steps = simulate(replace(CONFIG, max_prefill_share=0.5), load, TIMES, 0.008, num_seeds=2)
    long_steps = simulate(
        replace(CONFIG, max_num_batched_tokens=2048, max_prefill_share=1.0), load, TIMES, 0.008, num_seeds=2
    )

    assert short_steps["ttft_mean_ms"] < long_steps["ttft_mean_ms"]
