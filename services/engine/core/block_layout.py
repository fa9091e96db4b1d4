"""How many blocks a sequence holds: on demand, or all that it could ever need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class BlockLayout(Protocol):
    """Decides the length of block tables."""

    def blocks_for(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the blocks that a sequence with so many tokens holds; elementwise."""
        ...


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Blocks as they are needed (PagedAttention, SOSP '23, §4.2)."""

    block_size: int

    def blocks_for(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Round up to whole blocks."""
        return (num_tokens + (self.block_size - 1)) // self.block_size


@dataclass(frozen=True, slots=True)
class ContiguousLayout:
    """The longest sequence's blocks for everyone, as without paging; for measurements only."""

    block_size: int
    max_model_len: int

    def blocks_for(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the same for any number of tokens."""
        return np.full_like(num_tokens, -(-self.max_model_len // self.block_size))
