"""Which sequences are too late."""

from __future__ import annotations

import heapq

from services.engine.core.request import Sequence


class DeadlineQueue:
    """Open sequences by deadline; entries of ended ones are dropped when they come up or outnumber the rest."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._open: set[int] = set()

    def add(self, sequence: Sequence) -> None:
        """Watch a sequence, if it has a deadline."""
        deadline = sequence.request.deadline
        if deadline is not None:
            self._open.add(sequence.handle)
            heapq.heappush(self._heap, (deadline, sequence.handle, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Stop watching a sequence that has ended."""
        self._open.discard(sequence.handle)
        if len(self._heap) > 2 * len(self._open) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._open]
            heapq.heapify(self._heap)

    def late(self, now: float) -> list[Sequence]:
        """Return the open sequences whose deadline is not after ``now``."""
        found: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now:
            _, handle, sequence = heapq.heappop(self._heap)
            if handle in self._open:
                self._open.discard(handle)
                found.append(sequence)
        return found
