"""Minutes of steps on the real model: the worker's memory must not grow.

``OCTAVO_SOAK_SECONDS`` sets the time, ten minutes unless it is given.
"""

from __future__ import annotations

import os
import time

import numpy as np
import psutil
import pytest

from services.worker.config import WorkerConfig
from services.worker.model_runner import TorchRunner
from services.worker.step import SamplingParams
from tests.unit.worker.small_engine import SmallEngine, load_request

SECONDS = float(os.environ.get("OCTAVO_SOAK_SECONDS", "600"))
# The time until every size of step and every kind of sampling has been there.
WARM_UP_SHARE = 0.25
# What the allocator may come to hold by chance; a leak of 1 KiB a step is several times as much in ten minutes.
MAX_GROWTH_BYTES = 8 * 2**20
MAX_RUNNING, MAX_PROMPT, MAX_OUTPUT = 24, 600, 60


class Life:
    """Requests of random lengths and settings that come and go."""

    def __init__(self, runner: TorchRunner) -> None:
        model = runner.load(load_request(block_size=16, max_num_batched_tokens=2048), lambda progress: None)
        self._engine = SmallEngine(runner, model)
        self._random = np.random.default_rng(0)
        self._vocab_size = model.vocab_size
        self._num_wanted: dict[int, int] = {}
        self.num_steps = 0
        self.num_ended = 0

    def step(self) -> None:
        """Let requests join, compute a step with chunks of a random size, and end what is long enough."""
        for slot in range(MAX_RUNNING):
            if slot not in self._num_wanted and self._random.random() < 0.2:
                self._join(slot)
        self._engine.run_step(max_tokens_each=int(self._random.choice([1, 16, 48, 80])))
        self.num_steps += 1
        for slot, sequence in list(self._engine.running.items()):
            assert not sequence.has_failed
            if len(sequence.output) >= self._num_wanted[slot]:
                self._engine.end(slot)
                del self._num_wanted[slot]
                self.num_ended += 1

    def _join(self, slot: int) -> None:
        prompt = self._random.integers(20, self._vocab_size, self._random.integers(1, MAX_PROMPT)).tolist()
        self._engine.add(slot, prompt, self._settings())
        self._num_wanted[slot] = int(self._random.integers(1, MAX_OUTPUT))

    def _settings(self) -> SamplingParams:
        draw = self._random
        if draw.random() < 0.3:
            return SamplingParams()
        return SamplingParams(
            temperature=float(draw.uniform(0.2, 1.5)),
            top_p=float(draw.uniform(0.5, 1.0)) if draw.random() < 0.5 else None,
            top_k=int(draw.integers(1, 200)) if draw.random() < 0.5 else None,
            min_p=float(draw.uniform(0.0, 0.2)) if draw.random() < 0.3 else None,
            seed=int(draw.integers(2**32)),
            presence_penalty=float(draw.uniform(-1, 1)) if draw.random() < 0.3 else 0.0,
            frequency_penalty=float(draw.uniform(-1, 1)) if draw.random() < 0.3 else 0.0,
            repetition_penalty=float(draw.uniform(0.8, 1.3)) if draw.random() < 0.3 else 1.0,
            logit_bias=((int(draw.integers(self._vocab_size)), 2.0),) if draw.random() < 0.2 else (),
            min_output_tokens=int(draw.integers(8)) if draw.random() < 0.2 else 0,
        )


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_steps_of_all_kinds_do_not_grow_the_worker() -> None:
    runner = TorchRunner(WorkerConfig(kv_cache_memory="256MiB"))
    life, process = Life(runner), psutil.Process()
    runner.wait_until_settled()
    sizes: list[int] = []
    started = time.monotonic()

    while (elapsed := time.monotonic() - started) < SECONDS:
        life.step()
        if elapsed > WARM_UP_SHARE * SECONDS:
            sizes.append(process.memory_info().rss)

    third = len(sizes) // 3
    growth_bytes = float(np.median(sizes[-third:]) - np.median(sizes[:third]))
    per_step = float(np.polyfit(np.arange(len(sizes)), sizes, 1)[0])
    print(f"{life.num_steps} steps, {life.num_ended} requests, {growth_bytes:+.0f} bytes, {per_step:+.1f} a step")
    assert life.num_ended > 0
    assert growth_bytes < MAX_GROWTH_BYTES
    assert per_step * len(sizes) < MAX_GROWTH_BYTES
