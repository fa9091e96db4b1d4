"""Which sequences are late."""

from __future__ import annotations

from services.engine.core.deadlines import DeadlineQueue
from tests.fakes.requests import make_sequence


def _handles(queue: DeadlineQueue, now: float) -> list[int]:
    return [sequence.handle for sequence in queue.late(now)]


def test_late_is_who_has_reached_the_deadline_earliest_first() -> None:
    queue = DeadlineQueue()
    for handle, deadline in ((1, 5.0), (2, 3.0), (3, 5.1)):
        queue.add(make_sequence(handle, [1], deadline=deadline))

    assert _handles(queue, 2.9) == []
    assert _handles(queue, 5.0) == [2, 1]


def test_each_is_late_once() -> None:
    queue = DeadlineQueue()
    queue.add(make_sequence(1, [1], deadline=1.0))

    assert _handles(queue, 9.0) == [1]
    assert _handles(queue, 9.0) == []


def test_without_a_deadline_nobody_is_late() -> None:
    queue = DeadlineQueue()
    queue.add(make_sequence(1, [1]))

    assert _handles(queue, 1e12) == []


def test_who_has_ended_is_not_late() -> None:
    queue = DeadlineQueue()
    first, second = make_sequence(1, [1], deadline=1.0), make_sequence(2, [1], deadline=1.0)
    queue.add(first)
    queue.add(second)

    queue.discard(first)
    queue.discard(first)

    assert _handles(queue, 2.0) == [2]


def test_ending_without_a_deadline_changes_nothing() -> None:
    queue = DeadlineQueue()
    queue.add(make_sequence(1, [1], deadline=1.0))

    queue.discard(make_sequence(2, [1]))

    assert _handles(queue, 1.0) == [1]


def test_memory_follows_who_is_open() -> None:
    queue = DeadlineQueue()
    queue.add(make_sequence(1, [1], deadline=1.0))
    for handle in range(2, 5_000):
        sequence = make_sequence(handle, [1], deadline=1000.0 + handle)
        queue.add(sequence)
        queue.discard(sequence)

    assert len(queue._heap) < 100
    assert _handles(queue, 1e9) == [1]
