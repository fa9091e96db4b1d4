"""Counts operations and bytes of a step from the model's shape and the batch.

Owns the counting. It must not know clocks, metrics or how a step is computed: the worker's metrics and
``scripts.bench_worker`` have the same counts from here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from services.worker.input_batch import FlatBatch
from services.worker.step_work import StepKind, StepWork
from services.worker.weights import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """Bytes of a model's matrices as they lie in memory.

    Of an embedding that is not the head as well a step reads a row for each token, which is not worth counting.
    """

    layers_bytes: int
    head_bytes: int


def weight_sizes_of(config: ModelConfig, num_head_rows: int, value_bytes: int) -> WeightSizes:
    """Return the sizes of weights that lie in memory as they are, ``value_bytes`` for each value."""
    num_vocab_matrices = 1 if config.has_tied_embeddings else 2
    layers = config.num_parameters - num_vocab_matrices * config.vocab_size * config.hidden_size
    head = num_head_rows * config.hidden_size
    return WeightSizes(layers_bytes=layers * value_bytes, head_bytes=head * value_bytes)


class WorkCounter:
    """Counts the work of one model's steps."""

    def __init__(self, config: ModelConfig, weights: WeightSizes, *, kv_value_bytes: int) -> None:
        self._weights = weights
        self._num_layers_by_window = Counter(config.window_of(layer) for layer in range(config.num_layers))
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._operations_per_token = (
            2 * config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
        )
        # A score and a weighted sum of values, each a product with head_dim terms in every query head.
        self._operations_per_attended_token = 2 * 2 * config.num_heads * config.head_dim
        self._operations_per_sampled_row = 2 * config.vocab_size * config.hidden_size
        self._kv_bytes_per_token = 2 * config.num_kv_heads * config.head_dim * kv_value_bytes

    def work_of(self, batch: FlatBatch) -> StepWork:
        """Count the work of one step."""
        num_sampled = len(batch.sampled_rows)
        num_attended = num_cached = 0  # over all layers
        for window, num_layers in self._num_layers_by_window.items():
            # A token at position p sees itself and the p tokens before it; a sequence needs what its first token
            # sees.
            seen, needed = batch.positions + 1, batch.context_lens
            if window is not None:
                seen, needed = np.minimum(seen, window), np.minimum(needed, window + batch.num_queries - 1)
            num_attended += num_layers * int(seen.sum())
            num_cached += num_layers * int(needed.sum())
        return StepWork(
            kind=StepKind.of(batch.num_queries - batch.num_drafts),
            num_operations=len(batch.token_ids) * self._operations_per_token
            + num_attended * self._operations_per_attended_token
            + num_sampled * self._operations_per_sampled_row,
            weight_bytes=self._weights.layers_bytes + (self._weights.head_bytes if num_sampled else 0),
            kv_bytes=num_cached * self._kv_bytes_per_token,
        )
