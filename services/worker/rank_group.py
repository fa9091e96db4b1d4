"""The group of ranks that compute one model together, as a runner sees it.

Owns the interface and the group of a lone rank. It must not know how several ranks find or hear each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.exchange import Exchange, ExchangeLayout
from services.worker.input_batch import FlatBatch


class RankGroup(Protocol):
    """A group that has formed. After a loss it never works again: loading forms another."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that every rank has room for."""
        ...

    @property
    def exchange(self) -> Exchange | None:
        """Where the ranks meet within a step; None for a lone rank."""
        ...

    def meet(self) -> None:
        """Return when all ranks have come here; raises WorkerLost when one does not."""
        ...

    def begin_batch(self, batch: FlatBatch) -> None:
        """Note which batch this rank is about to compute."""
        ...

    def end_batch(self) -> None:
        """Make sure that all ranks have computed the same batch; raises InternalError."""
        ...

    def agree(self, is_so: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return what is so on all ranks, the same on all; raises WorkerLost when one does not come.

        For what depends on time, which passes otherwise on each rank.
        """
        ...

    def leave(self) -> None:
        """Leave the group, so that no other rank waits for this one; may be called again."""
        ...


@dataclass(frozen=True, slots=True)
class LoneRank:
    """A rank that has the whole model."""

    num_blocks: int

    @property
    def exchange(self) -> Exchange | None:
        """Where the ranks meet: nowhere."""
        return None

    def meet(self) -> None:
        """Return at once."""

    def begin_batch(self, batch: FlatBatch) -> None:
        """Do nothing: nobody else computes it."""

    def end_batch(self) -> None:
        """Do nothing."""

    def agree(self, is_so: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return what is so here."""
        return is_so

    def leave(self) -> None:
        """Do nothing: nobody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a rank brings to the forming of its group."""

    group_id: str
    rank: int
    layout: ExchangeLayout
    # What must be equal on all ranks, in words: model, kernels, number formats.
    contract: str
    num_blocks: int
    exchange_timeout_seconds: float


FormGroup = Callable[[Membership, Callable[[], None]], RankGroup]
