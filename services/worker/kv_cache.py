"""The KV cache: how much memory it may take, and its tensors.

Owns measuring memory, the number of blocks and the layout. It must not know which block belongs to whom: the
engine does.

The memory is made resident soon after allocation, so that the process's resident size counts the whole cache from
then on. Memory that is only promised would look free to the next worker on this machine, which would promise it
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from libs.errors import ModelLoadFailed
from services.worker.resident_memory import ResidentMemory
from services.worker.weights import ModelConfig

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory that this process can count on."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCachePlan:
    """How large the cache will be."""

    num_blocks: int
    block_size: int
    bytes_per_block: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the cache, the null block included."""
        return (self.num_blocks + 1) * self.bytes_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBudget:
    """What the operator allows: a size, or a share of what is free up to a limit."""

    requested_bytes: int | None
    fraction: float
    limit_bytes: int


class KVCache:
    """Keys and values of all layers, in blocks.

    Every value in it is finite at all times: attention reads slots beyond a sequence's end and masks them, and
    a masked NaN would still be a NaN. One block more than the plan says, the null block, holds zeros for ever;
    block tables are padded with it.
    """

    def __init__(self, config: ModelConfig, plan: KVCachePlan, dtype: torch.dtype) -> None:
        self.plan = plan
        self.null_block_id = plan.num_blocks
        # Keys and values of one block of one layer are adjacent, so that a block is gathered as one piece.
        shape = (
            config.num_layers,
            plan.num_blocks + 1,
            plan.block_size,
            2,
            config.num_kv_heads,
            config.head_dim,
        )
        self._memory = _allocate(plan.size_bytes)
        self.layers = torch.from_numpy(self._memory.bytes).view(dtype).view(shape).unbind(0)

    def populate(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Make the cache resident, the first blocks first; its contents stay as they are."""
        self._memory.populate(should_stop, num_parts=len(self.layers))

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the contents of blocks ``[num_copies]`` to other blocks, in all layers."""
        for layer in self.layers:
            layer[targets] = layer[sources]

    def clear_slots(self, slots: Tensor) -> None:
        """Zero the slots ``[num_slots]`` that a failed sequence has written, so that the cache stays finite."""
        for layer in self.layers:
            layer.view(-1, *layer.shape[2:]).index_fill_(0, slots, 0)


def plan_kv_cache(
    config: ModelConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    budget: CacheBudget,
    memory: MemoryState,
    reserved_bytes: int,
) -> KVCachePlan:
    """Decide the number of blocks from what is allowed, what there is and what steps need beside the cache.

    Raises:
        ModelLoadFailed: when more is asked for than there is, or when not even one block fits.
    """
    bytes_per_block = config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    free_bytes = max(0, memory.available_bytes - reserved_bytes)
    if budget.requested_bytes is None:
        size_bytes = min(int(free_bytes * budget.fraction), budget.limit_bytes)
    else:
        size_bytes = budget.requested_bytes
        if size_bytes > free_bytes:
            raise ModelLoadFailed(
                f"The KV cache was asked to take {size_bytes} bytes, but of {memory.available_bytes} bytes of "
                f"available memory only {free_bytes} are left beside what a step needs; give it less with "
                "--kv-cache-memory."
            )
    num_blocks = size_bytes // bytes_per_block - 1
    if num_blocks < 1:
        raise ModelLoadFailed(
            f"{size_bytes} bytes hold no KV cache: a block of {block_size} tokens takes {bytes_per_block} bytes, "
            f"and two are the least; {memory.available_bytes} bytes of memory are available."
        )
    return KVCachePlan(num_blocks=num_blocks, block_size=block_size, bytes_per_block=bytes_per_block)


def measure_memory() -> MemoryState:
    """Measure what this machine and this process's control group allow."""
    machine = psutil.virtual_memory()
    total_bytes, available_bytes = int(machine.total), int(machine.available)
    for limit_file, usage_file, statistics_file in _CGROUP_LIMITS:
        limit, usage = _read_bytes(limit_file), _read_bytes(usage_file)
        if limit is not None and usage is not None and limit < total_bytes:
            total_bytes = limit
            free = max(0, limit - usage + _reclaimable_bytes(statistics_file))
            available_bytes = min(available_bytes, free)
    return MemoryState(total_bytes, available_bytes)


def _allocate(size_bytes: int) -> ResidentMemory:
    try:
        return ResidentMemory(size_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise ModelLoadFailed(f"Allocating {size_bytes} bytes for the KV cache failed: {error}.") from error


def _read_bytes(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit.


def _reclaimable_bytes(path: str) -> int:
    """Return the file pages of a control group, which count as used and are given up under pressure."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    values = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    return int(values.get("inactive_file", "0"))
