"""Small models in native code, and the batches that a runner would hand to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from services.worker.config import Quantization
from services.worker.input_batch import FlatBatch
from services.worker.kernels.cpu.cache import TiledKVCache
from services.worker.kernels.cpu.extension import load_extension
from services.worker.kernels.cpu.forward_pass import NativeForwardPass
from services.worker.kv_cache import KVCachePlan
from services.worker.weight_files import open_weights
from services.worker.weights import WeightReader
from tests.unit.worker.small_models import random_model, save_model

BLOCK_SIZE = 16

EXTENSION = load_extension()
KERNELS = EXTENSION.supported_kernels() if EXTENSION else ["portable"]
needs_kernels = pytest.mark.skipif(
    EXTENSION is None, reason="needs the compiled kernels: python -m services.worker.kernels.cpu.build"
)


@dataclass(frozen=True)
class Part:
    """Tokens of a sequence that a batch computes: those from ``num_computed`` on."""

    token_ids: Sequence[int]
    num_computed: int
    block_ids: Sequence[int]


def rounded_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a model whose weights are bfloat16 values, so that only activations are rounded by the kernels."""
    model = random_model(family, **({"head_dim": 32} | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def rounded_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a Llama model whose weights are bfloat16 values."""
    model = rounded_model("llama", **changes)
    assert isinstance(model, LlamaForCausalLM)
    return model


def flat_batch(parts: Sequence[Part], block_size: int = BLOCK_SIZE) -> FlatBatch:
    counts = np.array([len(part.token_ids) - part.num_computed for part in parts])
    tables = np.zeros((len(parts), max(len(part.block_ids) for part in parts)), dtype=np.int32)
    for index, part in enumerate(parts):
        tables[index, : len(part.block_ids)] = part.block_ids
    positions = np.concatenate([np.arange(part.num_computed, len(part.token_ids)) for part in parts])
    sequences = np.repeat(np.arange(len(parts)), counts)
    return FlatBatch(
        slots=np.arange(len(parts)),
        first_rows=np.cumsum(counts) - counts,
        num_queries=counts,
        context_lens=np.array([len(part.token_ids) for part in parts]),
        block_tables=tables,
        token_ids=np.concatenate([np.array(part.token_ids[part.num_computed :]) for part in parts]),
        positions=positions,
        slot_mapping=tables[sequences, positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        is_sampled=np.ones(len(parts), dtype=np.bool_),
        num_drafts=np.zeros(len(parts), dtype=np.int64),
    )


class NativeLlama:
    """A small model in native code with a cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        *,
        kernels: str = "",
        num_threads: int = 2,
        num_blocks: int = 256,
        block_size: int = BLOCK_SIZE,
        quantization: Quantization = Quantization.NONE,
    ) -> None:
        assert EXTENSION is not None
        source = open_weights(save_model(model, folder))
        config = source.config
        self._block_size = block_size
        self.forward_pass = NativeForwardPass(
            EXTENSION,
            config,
            WeightReader(source, torch.bfloat16, lambda done, total: None),
            block_size=block_size,
            num_threads=num_threads,
            kernels=kernels,
            quantization=quantization,
        )
        size = config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * 2
        plan = KVCachePlan(num_blocks=num_blocks, block_size=block_size, bytes_per_block=size)
        cache = self.forward_pass.make_cache(plan)
        assert isinstance(cache, TiledKVCache)
        self.cache = cache

    def last_logits(self, *parts: Part) -> torch.Tensor:
        """Compute a step and return the logits of each part's last token, ``[num_parts, vocab_size]``."""
        batch = flat_batch(parts, self._block_size)
        forwarded = self.forward_pass.run(batch)
        assert forwarded.is_finite.all()
        return torch.from_numpy(forwarded.logits(batch.is_sampled)).clone()
