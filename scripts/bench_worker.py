"""Time steps of the worker's native kernels beside what this machine allows; one JSON object is the last line.

Measures memory bandwidth and the rate of bfloat16 products in registers (before, between and after the steps; the
best counts), then decode steps and prefills of the model, each beside its floor:
``max(weight bytes / bandwidth, operations / peak) + KV bytes / bandwidth``. With ``--torch`` the same steps are
timed by torch as well. Blocks lie at random addresses, as they do after a while of serving. Times are the best of
several; another process that wants a core makes all threads wait for the one that it displaces.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from libs.text import resolve_model_path
from services.worker.config import WorkerConfig
from services.worker.forward_pass import ForwardPass, TorchForwardPass
from services.worker.input_batch import FlatBatch
from services.worker.kernels.cpu.extension import NativeModel, load_extension
from services.worker.kernels.cpu.forward_pass import NativeForwardPass
from services.worker.kv_cache import KVCachePlan
from services.worker.layers.threads import OperatorThreads
from services.worker.weight_files import open_weights
from services.worker.weights import ModelConfig, WeightReader, WeightSource

BLOCK_SIZE = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 1_024)
PREFILLS = (64, 128, 256, 512, 1_000)
_DTYPE = torch.bfloat16
_PROBE_BYTES = 256 * 2**20
_PROBE_ROUNDS = 3
_MIN_REPEATS, _MAX_REPEATS = 3, 200


@dataclass(frozen=True, slots=True)
class Timed:
    """A step with its time; ``torch_ms`` only where torch was timed too."""

    batch: FlatBatch
    ms: float
    torch_ms: float | None


class Probes:
    """What the machine does at best, as far as this run has seen it."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self.bandwidths: list[float] = []
        self.peaks: list[float] = []

    def take(self) -> None:
        """Measure both once."""
        self.bandwidths.append(self._model.read_bandwidth(_PROBE_BYTES, _PROBE_ROUNDS))
        self.peaks.append(self._model.multiply_rate(_PROBE_ROUNDS))

    def floor_ms(self, config: ModelConfig, batch: FlatBatch, num_sampled: int) -> float:
        """Return the least time of a step."""
        bandwidth, peak = max(self.bandwidths), max(self.peaks)
        weights = self._model.weight_bytes / bandwidth
        kv_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * int(batch.context_lens.sum())
        operations = num_operations(config, batch, num_sampled)
        return 1e3 * (max(weights, operations / peak) + kv_values * _DTYPE.itemsize / bandwidth)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=WorkerConfig().model, help="as --model of the worker")
    parser.add_argument("--threads", type=int, default=WorkerConfig().num_threads_used)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each step measured")
    parser.add_argument("--torch", action="store_true", help="time torch's forward pass beside each step")
    options = parser.parse_args()
    extension = load_extension()
    if extension is None:
        sys.exit("The kernels are not built: python -m services.worker.kernels.cpu.build")
    torch.set_num_threads(options.threads)
    source = open_weights(resolve_model_path(options.model))
    config = source.config
    native = NativeForwardPass(
        extension, config, _reader(source), block_size=BLOCK_SIZE, num_threads=options.threads
    )
    num_blocks = max(BATCHES) * max(CONTEXTS) // BLOCK_SIZE
    passes: list[ForwardPass] = [native]
    if options.torch:
        passes.append(TorchForwardPass(config, _reader(source), _DTYPE, OperatorThreads(options.threads)))
    for forward_pass in passes:
        forward_pass.make_cache(_plan(config, num_blocks))
    print(json.dumps(_measure(native.native_model, passes, config, num_blocks, options.seconds)))


def num_operations(config: ModelConfig, batch: FlatBatch, num_sampled: int) -> float:
    """Count the multiplications and additions of a step."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
    # A token at position p attends to p + 1 tokens, with a product for the score and one for the values.
    attended = int((batch.positions + 1).sum()) * 2 * config.num_layers * config.num_heads * config.head_dim
    head = num_sampled * config.vocab_size * config.hidden_size
    return 2.0 * (len(batch.token_ids) * per_token + attended + head)


def _measure(
    model: NativeModel, passes: list[ForwardPass], config: ModelConfig, num_blocks: int, seconds: float
) -> dict[str, object]:
    probes = Probes(model)
    blocks = np.random.default_rng(0).permutation(num_blocks)
    decodes: list[tuple[int, int, Timed]] = []
    prefills: list[tuple[int, Timed]] = []
    for context in CONTEXTS:
        for size in BATCHES:
            probes.take()
            batch = make_batch(size, context, 1, blocks)
            decodes.append((size, context, _time(passes, batch, seconds)))
            print(f"decode of {size} at context {context}: {_described(decodes[-1][2])}", flush=True)
    for count in PREFILLS:
        probes.take()
        prefills.append((count, _time(passes, make_batch(1, count, count, blocks), seconds)))
        print(f"prefill of {count}: {_described(prefills[-1][1])}", flush=True)
    probes.take()
    dtype = str(_DTYPE).removeprefix("torch.")
    return {
        "kernels": model.kernels,
        "bandwidth_gb_s": round(max(probes.bandwidths) / 1e9, 1),
        "bandwidth_probes_gb_s": [round(value / 1e9, 1) for value in probes.bandwidths],
        "peak_bf16_gflop_s": round(max(probes.peaks) / 1e9, 1),
        "decode": [
            {"dtype": dtype, "batch": size, "context": context, "ms": round(timed.ms, 3)}
            | {"floor_ms": round(probes.floor_ms(config, timed.batch, size), 3)}
            | _torch_part(timed)
            for size, context, timed in decodes
        ],
        "prefill": [
            {"dtype": dtype, "tokens": count, "ms": round(timed.ms, 3)}
            | {"mfu": round(num_operations(config, timed.batch, 1) / timed.ms * 1e3 / max(probes.peaks), 3)}
            | _torch_part(timed)
            for count, timed in prefills
        ],
    }


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
    )


def _time(passes: list[ForwardPass], batch: FlatBatch, seconds: float) -> Timed:
    times = [_best_ms(partial(_step, forward_pass, batch), seconds) for forward_pass in passes]
    return Timed(batch, times[0], times[1] if len(times) > 1 else None)


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


def _described(timed: Timed) -> str:
    beside = "" if timed.torch_ms is None else f", torch {timed.torch_ms:.2f} ms"
    return f"{timed.ms:.2f} ms{beside}"


def _torch_part(timed: Timed) -> dict[str, float]:
    return {} if timed.torch_ms is None else {"torch_ms": round(timed.torch_ms, 3)}


def _reader(source: WeightSource) -> WeightReader:
    return WeightReader(source, _DTYPE, lambda done, total: None)


def _plan(config: ModelConfig, num_blocks: int) -> KVCachePlan:
    values = config.num_layers * BLOCK_SIZE * 2 * config.num_kv_heads * config.head_dim
    return KVCachePlan(num_blocks=num_blocks, block_size=BLOCK_SIZE, bytes_per_block=values * _DTYPE.itemsize)


if __name__ == "__main__":
    main()
