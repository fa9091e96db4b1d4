"""Time steps of a model in one rank and in two, on the same cores; one JSON object is the last line.

Each rank is a process that loads its shard and computes the same steps through shared memory, as workers do. Ranks
on the same cores share what these can do, so this shows what dividing a model and meeting cost.
Times are rank 0's: the best and the median of some repeats, and the share of them spent waiting for the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from libs.errors import WorkerLost
from libs.text import resolve_model_path
from scripts.bench_worker import BLOCK_SIZE, Step, make_batch
from scripts.octavo_under_test import cpu_model
from services.worker.config import WorkerConfig
from services.worker.exchange import ExchangeLayout
from services.worker.kernels.cpu.extension import load_extension
from services.worker.kernels.cpu.forward_pass import NativeForwardPass
from services.worker.kv_cache import KVCachePlan
from services.worker.models.shard import plan_shard
from services.worker.rank_group import Membership
from services.worker.rendezvous import form_group
from services.worker.weight_files import open_weights
from services.worker.weights import WeightReader

STEPS = (Step(1, 256, 1), Step(8, 256, 1), Step(64, 256, 1), Step(1, 512, 512))
_NUM_REPEATS = 40
_MAX_TOKENS = 512
_NUM_BLOCKS = 64 * 256 // BLOCK_SIZE
_EXCHANGE_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Division:
    """How the cores are used."""

    num_ranks: int
    num_threads: int  # of each rank


@dataclass(frozen=True, slots=True)
class Timed:
    """One kind of step in one division."""

    step: str
    best_ms: float
    median_ms: float
    waiting_share: float


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=WorkerConfig().model, help="as --model of the worker")
    options = parser.parse_args()
    if load_extension() is None:
        sys.exit("The kernels are not built: python -m services.worker.kernels.cpu.build")
    num_cores = WorkerConfig().num_threads_used
    divisions = [Division(1, 1), Division(1, num_cores), Division(2, max(1, num_cores // 2))]
    results = [asdict(division) | {"steps": _run(options.model, division)} for division in divisions]
    machine = {"cpu": cpu_model(), "num_cores": os.cpu_count()}
    print(json.dumps({"benchmark": "ranks", "machine": machine, "divisions": results}))


def _run(model: str, division: Division) -> list[dict[str, object]]:
    spawn = multiprocessing.get_context("spawn")
    group_id = uuid.uuid4().hex
    receiver, sender = spawn.Pipe(duplex=False)
    ranks = [
        spawn.Process(target=_serve, args=(model, division, rank, group_id, sender))
        for rank in range(division.num_ranks)
    ]
    for rank in ranks:
        rank.start()
    timed: list[Timed] = receiver.recv()
    for rank in ranks:
        rank.join()
    for each in timed:
        print(
            f"{division.num_ranks} x {division.num_threads} threads, {each.step}: {each.best_ms:.2f} ms at best, "
            f"{each.median_ms:.2f} in the median, {each.waiting_share:.0%} waiting",
            flush=True,
        )
    return [asdict(each) for each in timed]


@torch.inference_mode()
def _serve(model: str, division: Division, rank: int, group_id: str, sender: Connection) -> None:
    """Be one rank."""
    extension = load_extension()
    assert extension is not None, "looked at before ranks were started"
    source = open_weights(resolve_model_path(model))
    shard = plan_shard(source.config, rank, division.num_ranks)
    forward_pass = NativeForwardPass(
        extension,
        source.config,
        WeightReader(source, torch.bfloat16, lambda done, total: None),
        block_size=BLOCK_SIZE,
        num_threads=division.num_threads,
        shard=shard,
    )
    config = shard.config_of(source.config)
    size = config.num_layers * BLOCK_SIZE * 2 * config.num_kv_heads * config.head_dim * torch.bfloat16.itemsize
    plan = KVCachePlan(num_blocks=_NUM_BLOCKS, block_size=BLOCK_SIZE, bytes_per_block=size)
    forward_pass.make_cache(plan).populate()
    layout = ExchangeLayout(
        num_ranks=division.num_ranks,
        max_num_tokens=_MAX_TOKENS,
        max_head_rows=1,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
    group = form_group(
        Membership(
            group_id=group_id,
            rank=rank,
            layout=layout,
            contract=model,
            num_blocks=_NUM_BLOCKS,
            exchange_timeout_seconds=_EXCHANGE_TIMEOUT_SECONDS,
        ),
        lambda: None,
    )
    if group.exchange is not None:
        forward_pass.join(group.exchange)
    timed = [_time(forward_pass, step) for step in STEPS]
    # None leaves before the others have all that they need; who comes late finds that they have left.
    with contextlib.suppress(WorkerLost):
        group.meet()
    group.leave()
    if rank == 0:
        sender.send(timed)


def _time(forward_pass: NativeForwardPass, step: Step) -> Timed:
    blocks = np.random.default_rng(0).permutation(_NUM_BLOCKS)
    batch = make_batch(step.num_sequences, step.context, step.num_tokens_each, blocks)
    forward_pass.run(batch)
    times: list[float] = []
    waited_before = forward_pass.exchange_wait_seconds
    for _ in range(_NUM_REPEATS):
        start = time.perf_counter()
        forward_pass.run(batch).logits(batch.is_sampled)
        times.append(time.perf_counter() - start)
    waited = forward_pass.exchange_wait_seconds - waited_before
    return Timed(
        str(step),
        best_ms=round(1e3 * min(times), 3),
        median_ms=round(1e3 * statistics.median(times), 3),
        waiting_share=round(waited / sum(times), 3),
    )


if __name__ == "__main__":
    main()
