"""The queue's order equals a sorted list's, whatever is taken out of its middle."""

from __future__ import annotations

import random

import pytest

from services.engine.core.request_queue import RequestQueue
from tests.fakes.requests import make_sequence


def _take_all(queue: RequestQueue) -> list[int]:
    handles = []
    while (first := queue.peek()) is not None:
        queue.remove(first)
        handles.append(first.handle)
    return handles


def test_empty_queue_has_nobody_first() -> None:
    assert RequestQueue().peek() is None


def test_higher_priority_goes_first_then_arrival() -> None:
    queue = RequestQueue()
    for handle, priority in ((1, 0), (2, 5), (3, -2), (4, 5), (5, 0)):
        queue.push(make_sequence(handle, [1], priority=priority))

    assert _take_all(queue) == [2, 4, 1, 5, 3]


def test_who_comes_back_has_the_old_place() -> None:
    queue = RequestQueue()
    first, second, third = (make_sequence(handle, [1]) for handle in (1, 2, 3))
    for sequence in (first, second, third):
        queue.push(sequence)
    queue.remove(first)
    queue.remove(second)

    queue.push(second)

    assert _take_all(queue) == [2, 3]


def test_who_comes_back_is_taken_once() -> None:
    queue = RequestQueue()
    sequence = make_sequence(1, [1])
    for _ in range(3):
        queue.push(sequence)
        queue.remove(sequence)
    queue.push(sequence)

    assert len(queue) == 1
    assert _take_all(queue) == [1]
    assert queue.peek() is None


def test_removing_who_does_not_wait_is_our_own_mistake() -> None:
    with pytest.raises(KeyError):
        RequestQueue().remove(make_sequence(1, [1]))


def test_equals_a_sorted_list_over_random_pushes_and_removals() -> None:
    draw = random.Random(5)
    queue = RequestQueue()
    waiting = {}
    away = [make_sequence(n, [1] * draw.randint(1, 9), priority=draw.randint(-2, 2)) for n in range(1, 300)]
    for _ in range(8_000):
        if away and draw.random() < 0.5:
            sequence = away.pop(draw.randrange(len(away)))
            queue.push(sequence)
            waiting[sequence.handle] = sequence
        elif waiting:
            first = min(waiting.values(), key=lambda sequence: sequence.order)
            sequence = first if draw.random() < 0.5 else draw.choice(list(waiting.values()))
            queue.remove(sequence)
            del waiting[sequence.handle]
            away.append(sequence)
        expected = min(waiting.values(), key=lambda sequence: sequence.order, default=None)
        assert queue.peek() is expected
        assert len(queue) == len(waiting)
        assert {sequence.handle for sequence in queue} == waiting.keys()
        assert queue.num_pending_tokens == sum(len(sequence.token_ids) for sequence in waiting.values())


def test_memory_follows_what_waits() -> None:
    queue = RequestQueue()
    queue.push(make_sequence(1, [1], priority=1))
    for handle in range(2, 5_000):
        sequence = make_sequence(handle, [1])
        queue.push(sequence)
        queue.remove(sequence)

    assert len(queue._heap) < 100
