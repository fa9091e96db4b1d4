"""Sequences that wait for a slot, in their place in line."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator

from services.engine.core.request import Sequence


class RequestQueue:
    """Orders by place in line; a preempted sequence comes back to its old place.

    A sequence that waits for another one's work is *parked* under a key: it keeps its place and holds up nobody
    until the key is woken. Removal from the middle leaves a dead entry that is skipped later, so that no operation
    costs more than O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._waiting: dict[int, Sequence] = {}
        self._key_of: dict[int, Hashable] = {}
        self._parked: dict[Hashable, dict[int, Sequence]] = {}
        self._num_pending_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    @property
    def num_parked(self) -> int:
        """How many of those that wait are parked."""
        return len(self._key_of)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to be computed before the waiting sequences can go on, prefix hits not counted."""
        return self._num_pending_tokens

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._add(sequence)
        self._line_up(sequence)

    def push_parked(self, sequence: Sequence, key: Hashable) -> None:
        """Add a sequence that waits for ``key``."""
        self._add(sequence)
        self._park(sequence, key)

    def peek(self) -> Sequence | None:
        """Return the first in line without taking it."""
        while self._heap and not self._is_in_line(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def peek_second(self) -> Sequence | None:
        """Return the one behind the first in line."""
        if self.peek() is None:
            return None
        first = heapq.heappop(self._heap)
        # An entry that died comes to life again when its sequence comes back, beside the new one.
        while (second := self.peek()) is first[1]:
            heapq.heappop(self._heap)
        heapq.heappush(self._heap, first)
        return second

    def park_first(self, key: Hashable) -> None:
        """Let the first in line wait for ``key``."""
        sequence = self.peek()
        assert sequence is not None, "nobody is in line"
        heapq.heappop(self._heap)
        self._park(sequence, key)

    def wake(self, key: Hashable) -> None:
        """Put those that were parked under ``key`` back to their places."""
        for handle, sequence in self._parked.pop(key, {}).items():
            del self._key_of[handle]
            self._line_up(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._waiting[sequence.handle]
        if sequence.handle in self._key_of:
            self._unpark(sequence)
        self._num_pending_tokens -= len(sequence.token_ids)
        # Keep dead entries below the live ones in number, so that memory follows what really waits.
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if self._is_in_line(entry[1])]
            heapq.heapify(self._heap)

    def _add(self, sequence: Sequence) -> None:
        self._waiting[sequence.handle] = sequence
        self._num_pending_tokens += len(sequence.token_ids)

    def _line_up(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.order, sequence))

    def _park(self, sequence: Sequence, key: Hashable) -> None:
        self._key_of[sequence.handle] = key
        self._parked.setdefault(key, {})[sequence.handle] = sequence

    def _unpark(self, sequence: Sequence) -> None:
        key = self._key_of.pop(sequence.handle)
        del self._parked[key][sequence.handle]
        if not self._parked[key]:
            del self._parked[key]

    def _is_in_line(self, sequence: Sequence) -> bool:
        return self._waiting.get(sequence.handle) is sequence and sequence.handle not in self._key_of
