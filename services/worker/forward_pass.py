"""The forward pass as a runner sees it: a flat batch in, logits out.

Owns that interface, the one by torch, and the choice between it and native code. It must not know sampling or where
a batch came from.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.errors import ModelLoadFailed
from libs.obs import get_logger
from services.worker.config import KernelChoice, Quantization
from services.worker.exchange import Exchange
from services.worker.input_batch import FlatBatch
from services.worker.kernels.cpu.extension import load_extension
from services.worker.kernels.cpu.forward_pass import NativeForwardPass, reason_against
from services.worker.kernels.cpu.sampler import NativeRowSampler
from services.worker.kv_cache import KVCache, KVCachePlan
from services.worker.layers.attention import StepLayout
from services.worker.layers.threads import OperatorThreads
from services.worker.models.decoder import Decoder, ForwardBatch
from services.worker.models.shard import ModelShard, plan_shard
from services.worker.row_sampler import ReferenceRowSampler, RowSampler
from services.worker.step_work import MachineLimits
from services.worker.weights import ModelConfig, WeightReader
from services.worker.work_counter import WeightSizes, weight_sizes_of

_log = get_logger("forward_pass")

# Processors that show each other's stores in their order, which is all that the exchange of torch's pass relies on.
_ORDERED_MACHINES = ("x86_64", "amd64")


class Forwarded(Protocol):
    """What a forward pass gives."""

    @property
    def is_finite(self) -> NDArray[np.bool_]:
        """Whether all of a sequence's results are numbers, ``[num_seqs]``."""
        ...

    def logits(self, is_chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return the logits of the sampled rows of some of the batch's sampled sequences.

        ``is_chosen`` ``[num_seqs]`` names the sequences. The result is ``[num_rows, vocab_size]``, a row for each
        and one more for each of its drafts, and stays valid until the next step.
        """
        ...

    def row_logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits of any rows of the batch, ``[num_rows, vocab_size]``, valid until the next call."""
        ...


class ForwardPass(Protocol):
    """A loaded model."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are kept."""
        ...

    @property
    def kernels(self) -> str:
        """Name of what computes; ranks of one group must have the same."""
        ...

    def join(self, exchange: Exchange) -> None:
        """Compute together with the other ranks from now on, which must run the same batches.

        Raises:
            ModelLoadFailed: when this pass cannot do so here.
        """
        ...

    @property
    def exchange_wait_seconds(self) -> float:
        """Time that steps have waited for other ranks since joining them."""
        ...

    def make_cache(self, plan: KVCachePlan) -> KVCache:
        """Allocate the KV cache in the layout of this pass and use it from now on."""
        ...

    def run(self, batch: FlatBatch) -> Forwarded:
        """Compute all tokens of the batch, writing their keys and values; raises WorkerLost in a group of ranks."""
        ...

    @property
    def weight_sizes(self) -> WeightSizes:
        """Bytes of the weights as they lie in memory."""
        ...

    def measure_limits(self) -> MachineLimits | None:
        """Measure what this machine does at best, or return None where this pass has no means to."""
        ...


def load_forward_pass(
    choice: KernelChoice,
    config: ModelConfig,
    reader: WeightReader,
    *,
    dtype: torch.dtype,
    block_size: int,
    num_threads: int,
    quantization: Quantization = Quantization.NONE,
    shard: ModelShard | None = None,
) -> ForwardPass:
    """Load the weights into the pass that ``choice`` names, or into the fastest one that can serve them.

    They are those of the whole model, or of one rank's part of it.

    Raises:
        ModelLoadFailed: when native code is demanded, or needed for quantized weights, and cannot serve this.
    """
    extension = None if choice is KernelChoice.TORCH else load_extension()
    if choice is not KernelChoice.TORCH:
        reason = reason_against(extension, config, dtype=dtype, block_size=block_size)
        if reason is None and extension is not None:
            return NativeForwardPass(
                extension,
                config,
                reader,
                block_size=block_size,
                num_threads=num_threads,
                quantization=quantization,
                shard=shard,
            )
        if quantization is not Quantization.NONE:
            raise ModelLoadFailed(
                f"Weights in {quantization} need the native kernels, but {reason}; "
                "without --quantization torch serves."
            )
        if choice is KernelChoice.NATIVE:
            raise ModelLoadFailed(f"The native kernels are asked for, but {reason}; leave --kernels at auto.")
        _log.warning("computing with torch, which is several times slower", reason=reason)
    return TorchForwardPass(config, reader, dtype, OperatorThreads(num_threads), shard)


def make_row_sampler(
    choice: KernelChoice, forward_pass: ForwardPass, *, vocab_size: int, num_threads: int
) -> RowSampler:
    """Return what samples the rows of a pass: native code where it may be used, on the pass's own threads."""
    extension = None if choice is KernelChoice.TORCH else load_extension()
    if extension is None:
        return ReferenceRowSampler()
    model = forward_pass.native_model if isinstance(forward_pass, NativeForwardPass) else None
    return NativeRowSampler(extension, vocab_size=vocab_size, num_threads=num_threads, model=model)


class TorchForwardPass:
    """The pass by torch: the reference for native code, and what serves where there is none."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        dtype: torch.dtype,
        threads: OperatorThreads,
        shard: ModelShard | None = None,
    ) -> None:
        """Load the model that ``config`` is about, or one rank's part of it."""
        shard = shard or plan_shard(config, 0, 1)
        self._exchange: Exchange | None = None
        self._config = shard.config_of(config)
        self._num_head_rows = shard.head_rows.size
        self._dtype = dtype
        self._model = Decoder(config, reader, dtype, threads, shard)
        self._weight_bytes = reader.kept_bytes
        self._cache: KVCache | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are kept."""
        return self._weight_bytes

    @property
    def weight_sizes(self) -> WeightSizes:
        """Bytes of the weights as they lie in memory."""
        return weight_sizes_of(self._config, self._num_head_rows, self._dtype.itemsize)

    @property
    def kernels(self) -> str:
        """Name of what computes."""
        return "torch"

    def join(self, exchange: Exchange) -> None:
        """Compute together with the other ranks from now on."""
        if platform.machine().lower() not in _ORDERED_MACHINES:
            raise ModelLoadFailed(
                "Several ranks need the native kernels on this processor; build them or serve with a "
                "tensor_parallel_size of 1."
            )
        self._exchange = exchange
        self._model.join(exchange)

    @property
    def exchange_wait_seconds(self) -> float:
        """Time that steps have waited for other ranks."""
        return 0.0 if self._exchange is None else self._exchange.wait_seconds

    def measure_limits(self) -> MachineLimits | None:
        """Return None: torch's operators are not what a probe in registers would measure."""
        return None

    def make_cache(self, plan: KVCachePlan) -> KVCache:
        """Allocate the KV cache."""
        self._cache = KVCache(self._config, plan, self._dtype)
        return self._cache

    def run(self, batch: FlatBatch) -> Forwarded:
        """Compute all tokens of the batch."""
        assert self._cache is not None, "a batch came before the KV cache was made"
        hidden = self._model.forward(
            ForwardBatch(
                token_ids=torch.from_numpy(batch.token_ids),
                positions=torch.from_numpy(batch.positions),
                slot_mapping=torch.from_numpy(batch.slot_mapping),
                layout=StepLayout(
                    first_rows=batch.first_rows,
                    num_queries=batch.num_queries,
                    context_lens=batch.context_lens,
                    block_tables=batch.block_tables,
                    block_size=self._cache.plan.block_size,
                ),
            ),
            self._cache,
        )
        return _TorchForwarded(self._model, hidden, batch)


@dataclass(frozen=True, slots=True, eq=False)
class _TorchForwarded:
    model: Decoder
    hidden: Tensor  # [num_tokens, hidden_size]
    batch: FlatBatch

    @property
    def is_finite(self) -> NDArray[np.bool_]:
        # A sum is finite only if all its terms are. Looking at every row, not only at those that are sampled, finds
        # a fault in the step in which it is written to the cache.
        is_finite = torch.isfinite(self.hidden.sum(-1, dtype=torch.float32)).numpy()
        by_sequence: NDArray[np.bool_] = np.logical_and.reduceat(is_finite, self.batch.first_rows)
        return by_sequence

    def logits(self, is_chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
        return self.row_logits(self.batch.sampled_rows_of(is_chosen))

    def row_logits(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.model.logits(self.hidden[torch.from_numpy(rows)]).numpy()
        return logits
