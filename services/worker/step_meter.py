"""Turns finished steps into the worker's metrics.

Owns what is remembered between steps for that: moving sums for utilization, and whose token came last for the idle
gap. It must not know clocks or how a step is computed; times are given.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from libs.obs.metrics import WorkerMetrics
from services.worker.step import IntArray, LoadedModel, StepInput, StepResult
from services.worker.step_work import MachineLimits, StepKind, StepWork

# Weight of the newest step in the moving sums: about the last twenty steps count.
_NEWEST_WEIGHT = 0.1
_NOTHING_COMPUTED = "empty"


class StepMeter:
    """Counts the steps of one worker."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._limits: MachineLimits | None = None
        self._recent: defaultdict[StepKind, _Recent] = defaultdict(_Recent)
        self._last: _LastStep | None = None

    def model_loaded(self, model: LoadedModel) -> None:
        """Begin anew with what a load has measured."""
        self._limits = model.limits
        self._recent.clear()
        self._last = None
        self._metrics.kv_cache_bytes.set(model.kv_cache_bytes)
        self._metrics.weights_bytes.set(model.weights_bytes)
        self._metrics.flops_utilization.clear()
        self._metrics.bandwidth_utilization.clear()
        self._metrics.peak_operations.set(model.limits.operations_per_second if model.limits else 0.0)
        self._metrics.peak_bandwidth.set(model.limits.bytes_per_second if model.limits else 0.0)

    def stream_opened(self) -> None:
        """Forget whose step was last: the sequences of another stream are not waiting here."""
        self._last = None

    def step_done(self, step: StepInput, result: StepResult, *, started: float, ended: float) -> None:
        """Count a step that ran from ``started`` to ``ended``, in seconds of any clock."""
        self._metrics.steps.inc()
        self._metrics.tokens.inc(result.num_computed_tokens)
        for failed in result.failed_sequences:
            self._metrics.failed_sequences.labels(failed.failure.value).inc()
        num_known = step.num_scheduled_tokens - step.num_draft_tokens
        kind = StepKind.of(num_known) if result.num_computed_tokens else None
        self._metrics.step_seconds.labels(_NOTHING_COMPUTED if kind is None else kind.value).observe(
            result.duration_seconds
        )
        self._metrics.exchange_wait_seconds.inc(result.exchange_wait_seconds)
        if result.work is not None:
            self._count_work(result.work, result.duration_seconds)
        if self._last is not None and self._last.is_continued_by(step):
            self._metrics.idle_gap_seconds.observe(max(0.0, started - self._last.ended))
        # A step without sequences, such as a sign of life, keeps nobody waiting and ends nobody's wait.
        if len(step.slots):
            self._last = _LastStep(step.slots, ended)

    def _count_work(self, work: StepWork, seconds: float) -> None:
        kind = work.kind.value
        self._metrics.model_operations.labels(kind).inc(work.num_operations)
        self._metrics.memory_bytes.labels(kind).inc(work.num_bytes)
        recent = self._recent[work.kind]
        recent.add(work, seconds)
        if self._limits is not None and recent.seconds > 0:
            operations, moved = recent.num_operations / recent.seconds, recent.num_bytes / recent.seconds
            self._metrics.flops_utilization.labels(kind).set(operations / self._limits.operations_per_second)
            self._metrics.bandwidth_utilization.labels(kind).set(moved / self._limits.bytes_per_second)


class _Recent:
    """Moving sums over steps of one kind; their quotients are rates."""

    def __init__(self) -> None:
        self.num_operations = self.num_bytes = self.seconds = 0.0

    def add(self, work: StepWork, seconds: float) -> None:
        self.num_operations += work.num_operations - _NEWEST_WEIGHT * self.num_operations
        self.num_bytes += work.num_bytes - _NEWEST_WEIGHT * self.num_bytes
        self.seconds += seconds - _NEWEST_WEIGHT * self.seconds


@dataclass(frozen=True, slots=True, eq=False)
class _LastStep:
    slots: IntArray  # [num_seqs]
    ended: float

    def is_continued_by(self, step: StepInput) -> bool:
        """Whether the step computes a sequence of this one, which so long had to wait."""
        newcomers = {sequence.slot for sequence in step.new_sequences}
        # Sets of a few numbers: numpy's take ten times as long, and the next step waits for this one.
        return not (set(step.slots.tolist()) - newcomers).isdisjoint(self.slots.tolist())
