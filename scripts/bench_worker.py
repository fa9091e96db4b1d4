"""Time steps of the worker's native kernels beside what this machine allows; one JSON object is the last line.

Measures memory bandwidth and the rate of products in registers (before, between and after the steps; the best
counts, all are printed), then decode steps and prefills of the model in each number format of its weights, each
beside its floor: ``max(weight bytes / bandwidth, operations / peak) + KV bytes / bandwidth``. Operations and bytes
are counted by the worker's own ``WorkCounter``. With ``--torch`` the same steps are timed by torch as well. Blocks
lie at random addresses, as they do after a while of serving. Times are the best of several, in two rounds through
all steps: the machine's memory is faster in some minutes than in others, for probes and steps alike. With
``--busy N`` the steps are timed once more while N processes want a core now and then (``scripts.busy_neighbours``),
and the mean is given as ``busy_ms``, with ``neighbour_wait_ms``: how long one of those waited for a core in the
mean. A plot of times and floors is written to ``--plot``.

Where the kernels multiply in tiles (AMX), some steps are timed with those for AVX512-BF16 as well, beside that
instruction set's own peak (``vectors``): the rate of tiles in registers is many times as high, and no program that
reads its inputs from memory comes near it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from libs.text import resolve_model_path
from scripts.busy_neighbours import busy_neighbours
from scripts.octavo_under_test import REPOSITORY, cpu_model
from services.worker.config import Quantization, WorkerConfig
from services.worker.forward_pass import ForwardPass, TorchForwardPass
from services.worker.input_batch import FlatBatch
from services.worker.kernels.cpu.extension import Extension, NativeModel, load_extension
from services.worker.kernels.cpu.forward_pass import NativeForwardPass
from services.worker.kv_cache import KVCachePlan
from services.worker.layers.threads import OperatorThreads
from services.worker.step_work import MachineLimits, StepWork
from services.worker.weight_files import open_weights
from services.worker.weights import ModelConfig, WeightReader, WeightSource
from services.worker.work_counter import WorkCounter

BLOCK_SIZE = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 1_024)
PREFILLS = (64, 128, 256, 512, 1_000, 2_048)
# Number formats of the weights by their names in the result.
WEIGHT_TYPES = {"bfloat16": Quantization.NONE, "int8": Quantization.INT8}
_DTYPE = torch.bfloat16
_PROBE_BYTES = 256 * 2**20
_PROBE_ROUNDS = 3
_MIN_REPEATS, _MAX_REPEATS = 3, 200


@dataclass(frozen=True, slots=True)
class Step:
    """A step to time: sequences of one context each, of which the last tokens are computed."""

    num_sequences: int
    context: int
    num_tokens_each: int

    @property
    def is_decode(self) -> bool:
        """Whether it is a decode step."""
        return self.num_tokens_each == 1

    def __str__(self) -> str:
        kind = f"decode of {self.num_sequences}" if self.is_decode else "prefill"
        return f"{kind} at context {self.context}"


@dataclass(frozen=True, slots=True)
class BusyTimes:
    """Beside busy processes: the mean time of a step, and of one of them until it had a core."""

    step_ms: float
    neighbour_wait_ms: float


@dataclass(frozen=True, slots=True)
class Timed:
    """A step with its time; ``torch_ms`` and ``busy`` only where those were timed too."""

    weight_type: str
    step: Step
    work: StepWork
    ms: float
    torch_ms: float | None
    busy: BusyTimes | None


class Probes:
    """What the machine does at best, as far as this run has seen it."""

    def __init__(self) -> None:
        self.bandwidths: list[float] = []
        self.peaks: dict[str, list[float]] = {weight_type: [] for weight_type in WEIGHT_TYPES}
        self.kernels = ""  # whose rates these are

    def take(self, model: NativeModel) -> None:
        """Measure once: the bandwidth of new memory and of the weights, and the rate of each format."""
        self.kernels = model.kernels
        self.bandwidths.append(model.read_bandwidth(_PROBE_BYTES, _PROBE_ROUNDS))
        self.bandwidths.append(model.weight_bandwidth(_PROBE_BYTES, _PROBE_ROUNDS))
        for name, quantization in WEIGHT_TYPES.items():
            self.peaks[name].append(model.multiply_rate(_PROBE_ROUNDS, quantization.value))

    def limits(self, weight_type: str) -> MachineLimits:
        """Return the best of all that was measured."""
        return MachineLimits(
            bytes_per_second=max(self.bandwidths), operations_per_second=max(self.peaks[weight_type])
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed: some steps with weights of one number format, by the kernels of one instruction set.

    Empty ``kernels`` are the fastest for this processor.
    """

    weight_type: str
    kernels: str
    steps: tuple[Step, ...]


STEPS = (
    *(Step(size, context, 1) for context in CONTEXTS for size in BATCHES),
    *(Step(1, count, count) for count in PREFILLS),
)
TILE_KERNELS, VECTOR_KERNELS = "amx_bf16", "avx512_bf16"
# Timed beside tiles.
VECTORS = Subject(
    "bfloat16", VECTOR_KERNELS, (Step(1, 256, 1), Step(32, 256, 1), Step(1, 256, 256), Step(1, 1_000, 1_000))
)


def main() -> None:
    """Run the benchmark."""
    options = _options()
    extension = load_extension()
    if extension is None:
        sys.exit("The kernels are not built: python -m services.worker.kernels.cpu.build")
    torch.set_num_threads(options.threads)
    source = open_weights(resolve_model_path(options.model))
    probes, timed = Probes(), list[Timed]()
    for weight_type in WEIGHT_TYPES:
        timed += _measure(Subject(weight_type, options.kernels, STEPS), extension, source, probes, options)
    result = _result(timed, probes, options)
    if probes.kernels == TILE_KERNELS and VECTOR_KERNELS in extension.supported_kernels():
        vector_probes = Probes()
        result["vectors"] = _figures(_measure(VECTORS, extension, source, vector_probes, options), vector_probes)
    if options.plot:
        _plot(result, Path(options.plot))
        print(f"plot: {options.plot}", flush=True)
    print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=WorkerConfig().model, help="as --model of the worker")
    parser.add_argument("--threads", type=int, default=WorkerConfig().num_threads_used)
    parser.add_argument("--kernels", default="", help="for which processors; the best for this one by default")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each step measured, in each round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds through all steps, of which the best counts")
    parser.add_argument("--torch", action="store_true", help="time torch's forward pass beside each step")
    parser.add_argument("--busy", type=int, default=0, help="processes beside which each step is timed again")
    plot = str(REPOSITORY / "build" / "bench-worker.png")
    parser.add_argument("--plot", default=plot, help="file of the plot; an empty one writes none")
    return parser.parse_args()


def _measure(
    subject: Subject, extension: Extension, source: WeightSource, probes: Probes, options: argparse.Namespace
) -> list[Timed]:
    config, weight_type = source.config, subject.weight_type
    native = NativeForwardPass(
        extension,
        config,
        _reader(source),
        block_size=BLOCK_SIZE,
        num_threads=options.threads,
        quantization=WEIGHT_TYPES[weight_type],
        kernels=subject.kernels,
    )
    passes: list[ForwardPass] = [native]
    if options.torch and weight_type == "bfloat16":
        passes.append(TorchForwardPass(config, _reader(source), _DTYPE, OperatorThreads(options.threads)))
    num_blocks = max(BATCHES) * max(CONTEXTS) // BLOCK_SIZE
    for forward_pass in passes:
        forward_pass.make_cache(_plan(config, num_blocks)).populate()
    counter = WorkCounter(config, native.weight_sizes, kv_value_bytes=_DTYPE.itemsize)
    blocks = np.random.default_rng(0).permutation(num_blocks)
    batches = [make_batch(step.num_sequences, step.context, step.num_tokens_each, blocks) for step in subject.steps]
    times_of_rounds = [_time_once(native, passes, batches, probes, options) for _ in range(options.rounds)]
    timed: list[Timed] = []
    for step, batch, rounds in zip(subject.steps, batches, zip(*times_of_rounds, strict=True), strict=True):
        times = [min(each) for each in zip(*rounds, strict=True)]
        busy = _busy_times(partial(_step, native, batch), options) if options.busy else None
        timed.append(
            Timed(weight_type, step, counter.work_of(batch), times[0], times[1] if times[1:] else None, busy)
        )
        beside = f", torch {times[1]:.2f} ms" if times[1:] else ""
        if busy is not None:
            beside += f", beside busy processes {busy.step_ms:.2f} ms, they wait {busy.neighbour_wait_ms:.2f} ms"
        print(f"{native.kernels}, {weight_type}, {step}: {times[0]:.2f} ms{beside}", flush=True)
    probes.take(native.native_model)
    return timed


def _time_once(
    native: NativeForwardPass,
    passes: Sequence[ForwardPass],
    batches: Sequence[FlatBatch],
    probes: Probes,
    options: argparse.Namespace,
) -> list[list[float]]:
    """Return the milliseconds of each step in each forward pass, with a probe of the machine before each step."""
    times: list[list[float]] = []
    for batch in batches:
        probes.take(native.native_model)
        times.append([_best_ms(partial(_step, forward_pass, batch), options.seconds) for forward_pass in passes])
    return times


def _result(timed: Sequence[Timed], probes: Probes, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "worker",
        "machine": {"cpu": cpu_model(), "num_cores": os.cpu_count(), "num_threads": options.threads},
        **_figures(timed, probes),
    }


def _figures(timed: Sequence[Timed], probes: Probes) -> dict[str, Any]:
    """Return what some kernels took, beside what the machine allows them."""
    return {
        "kernels": probes.kernels,
        "bandwidth_gb_s": round(max(probes.bandwidths) / 1e9, 1),
        "bandwidth_probes_gb_s": [round(value / 1e9, 1) for value in probes.bandwidths],
        "peak_bf16_gflop_s": round(max(probes.peaks["bfloat16"]) / 1e9, 1),
        "peak_int8_gop_s": round(max(probes.peaks["int8"]) / 1e9, 1),
        "peak_probes_gop_s": {
            weight_type: [round(value / 1e9, 1) for value in peaks] for weight_type, peaks in probes.peaks.items()
        },
        "decode": [
            {"dtype": each.weight_type, "batch": each.step.num_sequences, "context": each.step.context}
            | _times(each, probes)
            for each in timed
            if each.step.is_decode
        ],
        "prefill": [
            {"dtype": each.weight_type, "tokens": each.step.num_tokens_each}
            | _times(each, probes)
            | {"mfu": round(_share_of_peak(each, probes), 3)}
            for each in timed
            if not each.step.is_decode
        ],
    }


def _times(timed: Timed, probes: Probes) -> dict[str, float]:
    floor_ms = 1e3 * timed.work.floor_seconds(probes.limits(timed.weight_type))
    times = {"ms": timed.ms, "floor_ms": floor_ms, "torch_ms": timed.torch_ms}
    if timed.busy is not None:
        times |= {"busy_ms": timed.busy.step_ms, "neighbour_wait_ms": timed.busy.neighbour_wait_ms}
    return {name: round(ms, 3) for name, ms in times.items() if ms is not None}


def _share_of_peak(timed: Timed, probes: Probes) -> float:
    return timed.work.num_operations / (timed.ms / 1e3) / probes.limits(timed.weight_type).operations_per_second


def make_batch(num_seqs: int, context_len: int, num_queries: int, blocks: NDArray[np.int64]) -> FlatBatch:
    """Return a step in which each sequence computes its last ``num_queries`` tokens."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    tables = blocks[: num_seqs * num_blocks].reshape(num_seqs, num_blocks).astype(np.int32)
    positions = np.tile(np.arange(context_len - num_queries, context_len), num_seqs)
    sequences = np.repeat(np.arange(num_seqs), num_queries)
    return FlatBatch(
        slots=np.arange(num_seqs),
        first_rows=np.arange(num_seqs) * num_queries,
        num_queries=np.full(num_seqs, num_queries),
        context_lens=np.full(num_seqs, context_len),
        block_tables=tables,
        token_ids=np.arange(num_seqs * num_queries) % 1_000 + 100,
        positions=positions,
        slot_mapping=tables[sequences, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        + positions % BLOCK_SIZE,
        is_sampled=np.ones(num_seqs, dtype=np.bool_),
        num_drafts=np.zeros(num_seqs, dtype=np.int64),
    )


def _step(forward_pass: ForwardPass, batch: FlatBatch) -> None:
    forward_pass.run(batch).logits(batch.is_sampled)


@torch.inference_mode()
def _best_ms(work: Callable[[], object], seconds: float) -> float:
    work()
    best, begun = float("inf"), time.perf_counter()
    for repeat in range(_MAX_REPEATS):
        start = time.perf_counter()
        work()
        end = time.perf_counter()
        best = min(best, end - start)
        if repeat + 1 >= _MIN_REPEATS and end - begun > seconds:
            break
    return best * 1e3


@torch.inference_mode()
def _busy_times(work: Callable[[], object], options: argparse.Namespace) -> BusyTimes:
    """Return the mean times of some steps beside busy processes."""
    with busy_neighbours(options.busy) as neighbours:
        started, num_steps = time.perf_counter(), 0
        while num_steps < _MIN_REPEATS or time.perf_counter() - started < options.seconds:
            work()
            num_steps += 1
        step_ms = (time.perf_counter() - started) / num_steps * 1e3
        return BusyTimes(step_ms, neighbours.stop() * 1e3)


def _reader(source: WeightSource) -> WeightReader:
    return WeightReader(source, _DTYPE, lambda done, total: None)


def _plan(config: ModelConfig, num_blocks: int) -> KVCachePlan:
    values = config.num_layers * BLOCK_SIZE * 2 * config.num_kv_heads * config.head_dim
    return KVCachePlan(num_blocks=num_blocks, block_size=BLOCK_SIZE, bytes_per_block=values * _DTYPE.itemsize)


def _plot(result: dict[str, Any], path: Path) -> None:
    # Imported where it is used: the figures do not need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    decode, prefill = figure.subplots(1, 2)
    for weight_type in WEIGHT_TYPES:
        for context in CONTEXTS:
            rows = [row for row in result["decode"] if (row["dtype"], row["context"]) == (weight_type, context)]
            _draw(decode, [row["batch"] for row in rows], rows, f"{weight_type}, context {context}")
        rows = [row for row in result["prefill"] if row["dtype"] == weight_type]
        _draw(prefill, [row["tokens"] for row in rows], rows, weight_type)
    decode.set(title="Decode step", xlabel="sequences", ylabel="milliseconds")
    prefill.set(title="Prefill", xlabel="tokens", ylabel="milliseconds")
    peak, bandwidth = result["peak_bf16_gflop_s"], result["bandwidth_gb_s"]
    figure.suptitle(f"{result['machine']['cpu']}: {bandwidth} GB/s, {peak} GFLOP/s bf16; floors dashed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axes: Any, sizes: list[int], rows: list[dict[str, Any]], label: str) -> None:  # Any: matplotlib's own.
    (line,) = axes.plot(sizes, [row["ms"] for row in rows], marker="o", label=label)
    axes.plot(sizes, [row["floor_ms"] for row in rows], linestyle="--", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()
    axes.grid(visible=True, which="both", alpha=0.3)


if __name__ == "__main__":
    main()
