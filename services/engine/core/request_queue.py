"""Sequences that wait for a slot, in their place in line."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.engine.core.request import Sequence


class RequestQueue:
    """Orders by priority, then arrival; a preempted sequence comes back to its old place.

    Removal from the middle marks the entry and skips it later, so that no operation costs more than O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting: dict[int, Sequence] = {}
        self._num_pending_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to be computed before the waiting sequences can go on, prefix hits not counted."""
        return self._num_pending_tokens

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._waiting[sequence.handle] = sequence
        self._num_pending_tokens += len(sequence.token_ids)
        heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """Return the first in line without taking it."""
        while self._heap and self._waiting.get(self._heap[0][1].handle) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._waiting[sequence.handle]
        self._num_pending_tokens -= len(sequence.token_ids)
        # Keep marked entries below the live ones in number, so that memory follows what really waits.
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(entry.order, entry) for entry in self._waiting.values()]
            heapq.heapify(self._heap)
