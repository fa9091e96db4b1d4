"""Ranks of one group as threads of a test: the memory that they share is this process's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from services.worker.exchange import Exchange, ExchangeLayout

ResultT = TypeVar("ResultT")


def exchanges(layout: ExchangeLayout, *, timeout_seconds: float = 30.0) -> list[Exchange]:
    """Return each rank's view of fresh memory."""
    memory = np.zeros(layout.size_bytes, dtype=np.uint8)
    return [Exchange(memory, layout, rank, timeout_seconds=timeout_seconds) for rank in range(layout.num_ranks)]


def on_all_ranks(num_ranks: int, work: Callable[[int], ResultT]) -> list[ResultT]:
    """Run ``work(rank)`` on all ranks at once."""

    def in_inference_mode(rank: int) -> ResultT:
        # The mode belongs to the thread.
        with torch.inference_mode():
            return work(rank)

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(in_inference_mode, range(num_ranks)))
