from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from libs.obs.metrics import WorkerMetrics
from services.worker.step import LoadedModel, SampledTokens, StepInput, StepResult
from services.worker.step_meter import StepMeter
from services.worker.step_work import MachineLimits, StepKind, StepWork
from tests.unit.worker.small_engine import new_sequence, step

LIMITS = MachineLimits(bytes_per_second=1_000.0, operations_per_second=50_000.0)


class Meter:
    """A meter, its registry, and steps as short as they can be written."""

    def __init__(self, limits: MachineLimits | None = LIMITS) -> None:
        self.registry = CollectorRegistry()
        self.meter = StepMeter(WorkerMetrics(self.registry))
        self.load(limits)

    def load(self, limits: MachineLimits | None) -> None:
        self.meter.model_loaded(
            LoadedModel(
                num_blocks=1,
                block_size=1,
                max_model_len=1,
                eos_token_ids=(),
                tokenizer_digest=b"",
                vocab_size=1,
                gpu_type="CPU",
                total_vram_bytes=0,
                kv_cache_bytes=7,
                weights_bytes=9,
                limits=limits,
            )
        )

    def run(
        self, done: StepInput, work: StepWork | None, started: float, ended: float, num_tokens: int | None = None
    ) -> None:
        count = int(done.num_scheduled_tokens.sum()) if num_tokens is None else num_tokens
        result = StepResult.of(
            done,
            SampledTokens.none(),
            (),
            num_computed_tokens=count,
            duration_seconds=ended - started,
            work=work,
        )
        self.meter.step_done(done, result, started=started, ended=ended)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"octavo_worker_{name}", labels)


def work_of(kind: StepKind, num_operations: int, num_bytes: int) -> StepWork:
    return StepWork(kind=kind, num_operations=num_operations, weight_bytes=num_bytes - 10, kv_bytes=10)


def scheduled(*sequences: tuple[int, int], new: tuple[int, ...] = ()) -> StepInput:
    return step(
        new=[new_sequence(slot, [1, 2]) for slot in new], scheduled=[(slot, count, ()) for slot, count in sequences]
    )


def test_limits_and_sizes_of_a_load_are_shown() -> None:
    meter = Meter()

    assert meter.value("peak_operations_per_second") == 50_000
    assert meter.value("peak_memory_bytes_per_second") == 1_000
    assert (meter.value("kv_cache_bytes"), meter.value("weights_bytes")) == (7, 9)


def test_work_and_time_are_counted_by_kind() -> None:
    meter = Meter()

    meter.run(scheduled((0, 1), (1, 1)), work_of(StepKind.DECODE, 4_000, 200), 10.0, 10.5)
    meter.run(scheduled((0, 1), (1, 1)), work_of(StepKind.DECODE, 2_000, 100), 10.6, 10.85)
    meter.run(scheduled((2, 9), new=(2,)), work_of(StepKind.PREFILL, 30_000, 50), 11.0, 12.0)
    meter.run(scheduled(), None, 13.0, 13.01)

    assert meter.value("steps_total") == 4
    assert meter.value("tokens_total") == 13
    assert meter.value("step_seconds_count", kind="decode") == 2
    assert meter.value("step_seconds_sum", kind="decode") == pytest.approx(0.75)
    assert meter.value("step_seconds_sum", kind="prefill") == pytest.approx(1.0)
    assert meter.value("step_seconds_count", kind="empty") == 1
    assert meter.value("model_operations_total", kind="decode") == 6_000
    assert meter.value("memory_bytes_total", kind="decode") == 300
    assert meter.value("model_operations_total", kind="prefill") == 30_000


def test_utilization_is_work_of_recent_steps_over_their_time_and_the_limits() -> None:
    meter = Meter()
    steps = [(4_000, 200, 0.5), (2_000, 100, 0.25), (9_000, 150, 1.0), (1_000, 300, 0.5)]

    for operations, num_bytes, seconds in steps:
        meter.run(scheduled((0, 1)), work_of(StepKind.DECODE, operations, num_bytes), 0.0, seconds)

    # A step's weight is 0.9 to the power of how many came after it.
    weights = 0.9 ** np.arange(len(steps))[::-1]
    operations, num_bytes, seconds = (weights @ np.array(column) for column in zip(*steps, strict=True))
    assert meter.value("model_flops_utilization", kind="decode") == pytest.approx(operations / seconds / 50_000)
    assert meter.value("memory_bandwidth_utilization", kind="decode") == pytest.approx(num_bytes / seconds / 1_000)
    assert meter.value("model_flops_utilization", kind="prefill") is None


def test_without_limits_there_is_no_utilization() -> None:
    meter = Meter(limits=None)

    meter.run(scheduled((0, 1)), work_of(StepKind.DECODE, 4_000, 200), 0.0, 0.5)

    assert meter.value("model_flops_utilization", kind="decode") is None
    assert meter.value("model_operations_total", kind="decode") == 4_000
    assert meter.value("peak_operations_per_second") == 0


def test_the_idle_gap_is_the_time_that_a_sequence_waits_between_its_steps() -> None:
    meter = Meter()

    meter.run(scheduled((0, 9), new=(0,)), None, 1.0, 2.0)
    meter.run(scheduled((0, 1), (1, 5), new=(1,)), None, 2.003, 3.0)
    meter.run(scheduled((1, 1)), None, 3.001, 4.0)

    assert meter.value("idle_gap_seconds_count") == 2
    assert meter.value("idle_gap_seconds_sum") == pytest.approx(0.004)


def test_time_without_anybody_is_no_idle_gap() -> None:
    meter = Meter()

    meter.run(scheduled((0, 1), new=(0,)), None, 1.0, 2.0)
    meter.run(scheduled(), None, 7.0, 7.0)  # A sign of life.
    meter.run(scheduled((1, 3), new=(1,)), None, 20.0, 21.0)
    # The slot was given to another sequence meanwhile.
    meter.run(scheduled((1, 3), new=(1,)), None, 40.0, 41.0)
    meter.meter.stream_opened()
    meter.run(scheduled((1, 1)), None, 60.0, 61.0)

    assert meter.value("idle_gap_seconds_count") == 0


def test_a_load_begins_utilization_anew() -> None:
    meter = Meter()
    meter.run(scheduled((0, 1)), work_of(StepKind.DECODE, 4_000, 200), 0.0, 0.5)

    meter.load(LIMITS)

    assert meter.value("model_flops_utilization", kind="decode") is None
    assert meter.value("model_operations_total", kind="decode") == 4_000
