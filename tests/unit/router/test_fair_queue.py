"""The queue: bounded, by priority, fair between tenants, each request until its time is over."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.fair_queue import FairQueue, LaneKey, QueueFull, WaitingRequest
from services.router.placed_load import PlacementKey
from tests.unit.router.builders import request


def waiting(
    name: str,
    *,
    tenant_id: str = "tenant",
    priority: int = 0,
    model_name: str = "model",
    num_prompt_tokens: int = 100,
    expires_at: float = 100.0,
) -> WaitingRequest:
    asked = request(
        name,
        tenant_id=tenant_id,
        priority=priority,
        model_name=model_name,
        num_prompt_tokens=num_prompt_tokens,
    )
    return WaitingRequest(PlacementKey((1, name)), asked, enqueued_at=0.0, expires_at=expires_at)


def serve_some(queue: FairQueue, num_requests: int) -> list[str]:
    names: list[str] = []
    while len(names) < num_requests and (first := queue.first(passing_over=())) is not None:
        queue.serve(first.key)
        names.append(first.request.request_id)
    return names


def serve_all(queue: FairQueue) -> list[str]:
    return serve_some(queue, len(queue))


def test_serves_in_order_of_arrival() -> None:
    queue = FairQueue(10)
    for name in "abc":
        queue.push(waiting(name))

    assert serve_all(queue) == ["a", "b", "c"]


def test_serves_higher_priorities_first_also_over_lanes() -> None:
    queue = FairQueue(10)
    queue.push(waiting("low"))
    queue.push(waiting("high", priority=2))
    queue.push(waiting("middle", priority=1, model_name="other"))
    queue.push(waiting("high too", priority=2))

    assert serve_all(queue) == ["high", "high too", "middle", "low"]


def test_a_lane_that_must_wait_does_not_hold_up_another() -> None:
    queue = FairQueue(10)
    stuck, free = waiting("stuck", priority=5), waiting("free", model_name="other")
    queue.push(stuck)
    queue.push(free)

    assert queue.first(passing_over={stuck.lane_key}) == free
    assert queue.first(passing_over={stuck.lane_key, free.lane_key}) is None


def test_tenants_take_turns_whoever_has_sent_more() -> None:
    queue = FairQueue(100)
    for number in range(6):
        queue.push(waiting(f"a{number}", tenant_id="a"))
    for number in range(2):
        queue.push(waiting(f"b{number}", tenant_id="b"))

    assert serve_all(queue) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4", "a5"]


def test_a_turn_is_measured_in_tokens() -> None:
    queue = FairQueue(100)
    for number in range(3):
        queue.push(waiting(f"long{number}", tenant_id="a", num_prompt_tokens=1_000))
        queue.push(waiting(f"short{number}", tenant_id="b", num_prompt_tokens=320))

    assert serve_all(queue) == ["long0", "short0", "short1", "short2", "long1", "long2"]


def test_a_priority_is_more_than_a_turn() -> None:
    queue = FairQueue(100)
    queue.push(waiting("a0", tenant_id="a", priority=1))
    queue.push(waiting("b0", tenant_id="b"))
    queue.push(waiting("a1", tenant_id="a", priority=1))

    assert serve_all(queue) == ["a0", "a1", "b0"]


def test_a_tenant_that_was_away_has_saved_nothing_up_and_one_that_left_has_lost_nothing() -> None:
    queue = FairQueue(100)
    for number in range(9):
        queue.push(waiting(f"a{number}", tenant_id="a"))
    serve_some(queue, 4)
    for number in range(3):
        queue.push(waiting(f"b{number}", tenant_id="b"))
    # What is withdrawn was not served.
    queue.remove(PlacementKey((1, "a4")))
    queue.remove(PlacementKey((1, "a5")))

    assert serve_all(queue) == ["a6", "b0", "a7", "b1", "a8", "b2"]


def test_tenants_that_come_and_go_are_not_remembered_without_end() -> None:
    queue = FairQueue(100)
    queue.push(waiting("stays", tenant_id="stays", num_prompt_tokens=10**9))
    for number in range(1_000):
        queue.push(waiting(f"r{number}", tenant_id=f"t{number}", num_prompt_tokens=number + 1))
        queue.serve(PlacementKey((1, f"r{number}")))

    (line,) = (line for lane in queue._lanes.values() for line in lane.values())
    assert len(line._served_tokens) <= 67
    assert serve_all(queue) == ["stays"]


def test_a_full_queue_refuses_and_stays_as_it_was() -> None:
    queue = FairQueue(2)
    queue.push(waiting("a"))
    queue.push(waiting("b"))

    with pytest.raises(QueueFull):
        queue.push(waiting("c"))

    assert serve_all(queue) == ["a", "b"]


def test_gives_out_who_has_waited_too_long() -> None:
    queue = FairQueue(10)
    queue.push(waiting("late", expires_at=30.0))
    queue.push(waiting("early", expires_at=10.0))
    queue.push(waiting("removed", expires_at=5.0))
    queue.remove(PlacementKey((1, "removed")))

    assert queue.next_expiry() == 10.0
    assert [expired.request.request_id for expired in queue.take_expired(9.9)] == []
    assert [expired.request.request_id for expired in queue.take_expired(10.0)] == ["early"]
    assert queue.next_expiry() == 30.0


def test_a_request_that_comes_again_keeps_only_its_new_expiry() -> None:
    queue = FairQueue(10)
    queue.push(waiting("a", expires_at=10.0))
    queue.remove(PlacementKey((1, "a")))
    queue.push(waiting("a", expires_at=20.0))

    assert queue.take_expired(15.0) == []
    assert len(queue.take_expired(20.0)) == 1


class QueueAgainstList(RuleBasedStateMachine):
    """The queue does what a list with a sort does, and its heap stays bounded."""

    MAX_REQUESTS = 6

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(self.MAX_REQUESTS)
        self.model: list[WaitingRequest] = []
        self.num_pushed = 0
        self.now = 0.0

    @rule(priority=st.integers(-2, 2), model_name=st.sampled_from("xy"), patience=st.floats(0, 10))
    def push(self, priority: int, model_name: str, patience: float) -> None:
        self.num_pushed += 1
        item = waiting(
            f"r{self.num_pushed}", priority=priority, model_name=model_name, expires_at=self.now + patience
        )
        if len(self.model) < self.MAX_REQUESTS:
            self.queue.push(item)
            self.model.append(item)
        else:
            with pytest.raises(QueueFull):
                self.queue.push(item)

    @rule(passed=st.sets(st.sampled_from("xy")))
    def serve(self, passed: set[str]) -> None:
        lanes = {LaneKey.of(request(model_name=name)) for name in passed}
        open_items = [item for item in self.model if item.request.model_name not in passed]
        first = self.queue.first(passing_over=lanes)
        assert first == (max(open_items, key=lambda item: item.request.priority) if open_items else None)
        if first is not None:
            assert self.queue.remove(first.key) == first
            self.model.remove(first)

    @rule(index=st.integers(0, 5))
    def cancel(self, index: int) -> None:
        if index < len(self.model):
            item = self.model.pop(index)
            assert self.queue.remove(item.key) == item
            assert self.queue.remove(item.key) is None

    @rule(seconds=st.floats(0, 5))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        expired = self.queue.take_expired(self.now)
        assert {item.key for item in expired} == {i.key for i in self.model if i.expires_at <= self.now}
        self.model = [item for item in self.model if item.expires_at > self.now]

    @rule()
    def take_all(self) -> None:
        assert self.queue.take_all() == self.model
        self.model = []

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.model)
        assert self.queue.num_prompt_tokens == sum(item.request.num_prompt_tokens for item in self.model)
        assert self.queue.next_expiry() == min((item.expires_at for item in self.model), default=None)
        assert all(self.queue.has_lane(item.lane_key) for item in self.model)


TestQueueAgainstList = QueueAgainstList.TestCase
