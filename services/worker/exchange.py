"""What the ranks of a group exchange within a step, through memory that their processes share.

Owns the layout of that memory, meeting in it within a bound, and the sums and logits of torch's forward pass. It
must not know how the processes came to share it. Native code meets in the same memory and adds in its own code;
``kernels/cpu/src/collective.hpp`` has the layout a second time.

Each rank writes only what is its own, so a rank that is killed in the middle of a step leaves nothing half changed:
the others see that it does not come.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.errors import InternalError, WorkerLost

# A line of the processor's cache, so that the words of two ranks do not share one.
_LINE_BYTES = 64
_WORDS_BYTES = 4096
MAX_RANKS = _WORDS_BYTES // _LINE_BYTES - 1
# Values of the group's word: whole, a rank has left, and from here on the rank that was waited for in vain.
_WHOLE, _LEFT, _TOO_LATE = 0, 1, 2
_COUNT_MASK = 2**32 - 1
_POLL_SECONDS = 20e-6
# Native kernels read and write rows of so many values, and rows in tiles of so many.
_ROW_UNIT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLayout:
    """Where everything lies; all ranks compute the same from what they are asked to serve."""

    num_ranks: int
    max_num_tokens: int
    max_head_rows: int  # computed at once beside a step's own
    hidden_size: int
    vocab_size: int

    @property
    def part_bytes(self) -> int:
        """Bytes of one rank's part of a sum, whole tiles of rows."""
        return _rounded_up(self.max_num_tokens) * _rounded_up(self.hidden_size) * np.dtype(np.float32).itemsize

    @property
    def parts_offset(self) -> int:
        """Where the parts begin: those of one sum, then those of the next."""
        return _WORDS_BYTES

    @property
    def logits_offset(self) -> int:
        """Where the logits begin: rows of the step, then rows beside it."""
        return self.parts_offset + 2 * self.num_ranks * self.part_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes in all. Most of them are never touched, and so take no memory."""
        num_rows = self.max_num_tokens + self.max_head_rows
        return self.logits_offset + num_rows * self.vocab_size * np.dtype(np.float32).itemsize


class Exchange:
    """One rank's view of the shared memory."""

    def __init__(
        self, memory: NDArray[np.uint8], layout: ExchangeLayout, rank: int, *, timeout_seconds: float
    ) -> None:
        """Begin with zeroed ``memory`` ``[layout.size_bytes]``, which this object keeps alive."""
        assert len(memory) >= layout.size_bytes, f"{len(memory)} bytes are too few for {layout}"
        self.memory = memory
        self.layout = layout
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.wait_seconds = 0.0  # in all, waiting for other ranks
        lines = memory[:_WORDS_BYTES].view(np.uint32).reshape(-1, _LINE_BYTES // 4)
        self._group, self._arrivals = lines[:1, 0], lines[1 : 1 + layout.num_ranks, 0]
        self._digests = lines[1 : 1 + layout.num_ranks, 1:3]
        self._num_batches = 0
        parts = memory[layout.parts_offset : layout.logits_offset].view(np.float32)
        self._parts = parts.reshape(2, layout.num_ranks, -1)
        self._logits: NDArray[np.float32] = (
            memory[layout.logits_offset : layout.size_bytes].view(np.float32).reshape(-1, layout.vocab_size)
        )

    @property
    def step_logits(self) -> NDArray[np.float32]:
        """Rows for the logits of a step, ``[max_num_tokens, vocab_size]``."""
        return self._logits[: self.layout.max_num_tokens]

    @property
    def head_logits(self) -> NDArray[np.float32]:
        """Rows for logits beside those of a step, ``[max_head_rows, vocab_size]``."""
        return self._logits[self.layout.max_num_tokens :]

    def begin_batch(self, digest: int) -> None:
        """Write down which batch this rank is about to compute; ``digest`` has 32 bits."""
        self._num_batches += 1
        # They take turns in two places: a rank that has gone on to the next batch still shows this one's.
        self._digests[self.rank, self._num_batches % 2] = digest

    def end_batch(self) -> None:
        """Make sure that all ranks, which have met since, have computed the same batch.

        Raises:
            InternalError: they have not, and their results mean nothing.
        """
        digests = self._digests[:, self._num_batches % 2]
        if (digests != digests[0]).any():
            raise InternalError("The ranks of the group have computed different batches.")

    def meet(self) -> None:
        """Return when all ranks have come here as often as this one.

        Raises:
            WorkerLost: a rank has left, or did not come within the timeout; the group is broken for ever then.
        """
        self.raise_if_broken()
        own = self._arrivals[self.rank : self.rank + 1]
        count = (int(own[0]) + 1) & _COUNT_MASK
        # Written after everything else of this rank: x86 shows other processors stores in their order.
        own[0] = count
        started = time.monotonic()
        for rank in range(self.layout.num_ranks):
            self._wait_for(rank, count, started)
        self.wait_seconds += time.monotonic() - started
        self.raise_if_broken()

    def add(self, part: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sum of the ranks' parts, the same bits on all; raises WorkerLost."""
        if part.nbytes > self.layout.part_bytes:
            raise InternalError(f"A sum over {part.size} values came to an exchange with less room.")
        # They take turns in two places: one that has gone on writes nothing that another still reads.
        place = self._parts[(int(self._arrivals[self.rank]) & 1), :, : part.size]
        place[self.rank] = part.reshape(-1)
        self.meet()
        total: NDArray[np.float32] = place[0].copy()
        for rank in range(1, self.layout.num_ranks):
            total += place[rank]
        return total.reshape(part.shape)

    def agree(self, is_so: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return what is so on all ranks, the same on all; raises WorkerLost."""
        num_ranks = self.add(is_so.astype(np.float32))
        agreed: NDArray[np.bool_] = num_ranks == self.layout.num_ranks
        return agreed

    def gather_columns(self, columns: NDArray[np.float32], first: int) -> NDArray[np.float32]:
        """Return rows of all ranks' columns, of which this rank has those from ``first`` on; raises WorkerLost."""
        if len(columns) > len(self._logits):
            raise InternalError(f"{len(columns)} rows of logits came to an exchange with less room.")
        self.meet()  # The rows before these have been read by all.
        rows = self._logits[: len(columns)]
        rows[:, first : first + columns.shape[1]] = columns
        self.meet()
        return rows.copy()

    def break_group(self) -> None:
        """Let no rank wait for this one any more."""
        if self._group[0] == _WHOLE:
            self._group[0] = _LEFT

    def raise_if_broken(self) -> None:
        """Raise WorkerLost when the group is broken."""
        word = int(self._group[0])
        if word >= _TOO_LATE:
            raise WorkerLost(
                f"Rank {word - _TOO_LATE} of {self.layout.num_ranks} did not come to an exchange within "
                f"{self.timeout_seconds:g} seconds."
            )
        if word != _WHOLE:
            raise WorkerLost("A rank of the group has left it.")

    def _wait_for(self, rank: int, count: int, started: float) -> None:
        arrived = self._arrivals[rank : rank + 1]
        # Counts wrap around; a rank is ahead by one at most.
        while (int(arrived[0]) - count) & _COUNT_MASK > 1 and self._group[0] == _WHOLE:
            if time.monotonic() - started > self.timeout_seconds:
                self._group[0] = _TOO_LATE + rank
            time.sleep(_POLL_SECONDS)


def _rounded_up(count: int) -> int:
    return -(-count // _ROW_UNIT) * _ROW_UNIT
