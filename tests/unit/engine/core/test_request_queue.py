"""The queue's order equals a sorted list's, whatever is taken out of its middle."""

from __future__ import annotations

import random

import pytest

from services.engine.core.request import Sequence
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


def test_who_is_parked_holds_up_nobody_and_keeps_the_place() -> None:
    queue = RequestQueue()
    for handle in (1, 2, 3):
        queue.push(make_sequence(handle, [1]))
    queue.park_first("work")
    assert [len(queue), queue.num_parked] == [3, 1]
    second = queue.peek()
    assert second is not None
    assert second.handle == 2

    queue.wake("work")

    assert queue.num_parked == 0
    assert _take_all(queue) == [1, 2, 3]


def test_wakes_all_of_one_key_and_nobody_else() -> None:
    queue = RequestQueue()
    for handle in (1, 2, 3):
        queue.push_parked(make_sequence(handle, [1]), "odd" if handle % 2 else "even")
    assert queue.peek() is None

    queue.wake("odd")
    queue.wake("unknown")

    assert _take_all(queue) == [1, 3]
    assert queue.num_parked == 1


def test_who_was_removed_while_parked_does_not_wake() -> None:
    queue = RequestQueue()
    first, second = make_sequence(1, [1]), make_sequence(2, [1])
    queue.push_parked(first, "work")
    queue.push_parked(second, "work")
    queue.remove(first)

    queue.wake("work")

    assert _take_all(queue) == [2]


def test_equals_a_sorted_list_over_random_pushes_parks_and_removals() -> None:
    draw = random.Random(5)
    queue = RequestQueue()
    waiting: dict[int, Sequence] = {}
    parked: dict[int, int] = {}
    away = [make_sequence(n, [1] * draw.randint(1, 9), priority=draw.randint(-2, 2)) for n in range(1, 200)]
    for _ in range(8_000):
        in_line = [sequence for handle, sequence in waiting.items() if handle not in parked]
        first = min(in_line, key=lambda sequence: sequence.order, default=None)
        chance = draw.random()
        if away and chance < 0.45:
            sequence = away.pop(draw.randrange(len(away)))
            waiting[sequence.handle] = sequence
            if chance < 0.05:
                parked[sequence.handle] = draw.randrange(5)
                queue.push_parked(sequence, parked[sequence.handle])
            else:
                queue.push(sequence)
        elif first and chance < 0.6:
            parked[first.handle] = draw.randrange(5)
            queue.park_first(parked[first.handle])
        elif chance < 0.7:
            key = draw.randrange(5)
            queue.wake(key)
            parked = {handle: other for handle, other in parked.items() if other != key}
        elif waiting:
            sequence = first if first and chance < 0.85 else draw.choice(list(waiting.values()))
            queue.remove(sequence)
            del waiting[sequence.handle]
            parked.pop(sequence.handle, None)
            away.append(sequence)
        in_line = [sequence for handle, sequence in waiting.items() if handle not in parked]
        in_line.sort(key=lambda sequence: sequence.order)
        assert queue.peek() is (in_line[0] if in_line else None)
        assert queue.peek_second() is (in_line[1] if len(in_line) > 1 else None)
        assert queue.peek() is (in_line[0] if in_line else None)
        assert len(queue) == len(waiting)
        assert queue.num_parked == len(parked)
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


def test_memory_follows_who_is_parked() -> None:
    queue = RequestQueue()
    for handle in range(1, 5_000):
        sequence = make_sequence(handle, [1])
        queue.push_parked(sequence, "work")
        queue.remove(sequence)

    assert sum(len(sequences) for sequences in queue._parked.values()) < 100
