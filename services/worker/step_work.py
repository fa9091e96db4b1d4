"""What a step costs a machine at least, and what the machine can do at best.

Owns these figures and how they are put together. It must not know how they are counted or measured, nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class StepKind(StrEnum):
    """What the sequences of a step do: those with one token decode, those with more prefill."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"

    @classmethod
    def of(cls, num_queries: NDArray[np.int64]) -> StepKind:
        """Tell from the known tokens that each sequence computes, ``[num_seqs]``, of which there is one."""
        num_prefills = int((num_queries > 1).sum())
        if num_prefills == 0:
            return cls.DECODE
        return cls.PREFILL if num_prefills == len(num_queries) else cls.MIXED


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """What a machine does at best, measured."""

    bytes_per_second: float  # read from memory by all threads
    operations_per_second: float  # of the model's number format, in registers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The least that a step has to do."""

    kind: StepKind
    num_operations: int  # multiplications and additions, each counted
    weight_bytes: int  # each weight once, the head only when a row is sampled
    kv_bytes: int  # keys and values of every token in the contexts once, read or written

    @property
    def num_bytes(self) -> int:
        """All that crosses the memory bus."""
        return self.weight_bytes + self.kv_bytes

    def floor_seconds(self, limits: MachineLimits) -> float:
        """Return the least time of the step: reading weights beside computing, then reading the cache."""
        return (
            max(self.weight_bytes / limits.bytes_per_second, self.num_operations / limits.operations_per_second)
            + self.kv_bytes / limits.bytes_per_second
        )
