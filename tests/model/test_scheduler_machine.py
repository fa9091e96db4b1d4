"""The scheduler under random requests, steps, aborts, expiries and failures, with every answer checked.

It runs with one and two steps in flight and with every policy.

What is checked lives in ``tests/fakes/watched_scheduler.py`` and ``tests/fakes/scheduling_rules.py``.
SKV-06 of the known faults.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libs.errors import DuplicateRequest, Overloaded, WorkerLost
from services.engine.core.request import Request
from services.engine.core.scheduler_config import Admission, Batching, Layout, SchedulerConfig, SpeculationConfig
from tests.fakes.kv_worker import greedy, repetitive, step_times
from tests.fakes.requests import make_request
from tests.fakes.watched_scheduler import Life, WatchedScheduler
from tests.model.budgets import machine_settings

_VOCAB_SIZE = 60
_MAX_WAITING = 8
_MAX_MODEL_LEN = 48

# Prompts are beginnings of two documents, so that many share prefixes and some are a prefix of others.
_DOCUMENTS = tuple(tuple((5 + 7 * i * step) % _VOCAB_SIZE for i in range(40)) for step in (1, 2))

# Pools that a few sequences outgrow, so that preemption and eviction are common.
_configs = st.builds(
    SchedulerConfig,
    num_blocks=st.sampled_from((12, 12, 14, 20)),
    block_size=st.just(4),
    max_model_len=st.just(_MAX_MODEL_LEN),
    max_num_seqs=st.sampled_from((6, 4, 1)),
    max_num_batched_tokens=st.sampled_from((64, 17, 8, 2)),
    max_waiting_sequences=st.just(_MAX_WAITING),
    eos_token_ids=st.sampled_from(((), (5,), (5, 11))),
    enable_prefix_caching=st.sampled_from((True, True, True, False)),
    watermark_fraction=st.sampled_from((0.0, 0.0, 0.1)),
    aging_seconds=st.sampled_from((0.0, 3.0, 30.0)),
    target_itl_seconds=st.sampled_from((None, None, 0.003)),
    max_prefill_share=st.sampled_from((0.5, 0.2, 1.0)),
    max_steps_in_flight=st.sampled_from((2, 2, 1)),
    admission=st.sampled_from((Admission.WATERMARK, Admission.WATERMARK, Admission.PREDICTED_PEAK)),
    batching=st.sampled_from((Batching.CONTINUOUS, Batching.CONTINUOUS, Batching.CONTINUOUS, Batching.STATIC)),
    layout=st.sampled_from((Layout.PAGED, Layout.PAGED, Layout.PAGED, Layout.CONTIGUOUS)),
    speculation=st.sampled_from(
        (
            None,
            SpeculationConfig(num_draft_tokens=4, min_ngram_tokens=1, max_ngram_tokens=3, max_drafting_seqs=6),
            SpeculationConfig(num_draft_tokens=2, min_ngram_tokens=2, max_ngram_tokens=2, max_drafting_seqs=2),
        )
    ),
)
# Decodes, reads and prompts all cost something, and no step takes exactly what the model says.
_NOISE = (0.0, 0.1, -0.05, 0.2, -0.15)


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    document = draw(st.sampled_from(_DOCUMENTS))
    num_prior = draw(st.sampled_from(((0,), (0,), (0,), (0, 0), (0, 0, 0), (3,), (1, 9), (0, 2))))
    num_output_tokens = max(num_prior) + draw(st.sampled_from((14, 24, 7, 3, 2, 1)))
    num_prompt_tokens = draw(st.sampled_from((9, 8, 12, 13, 7, 24, 15, 4, 17, 1)))
    return make_request(
        "named when added",
        document[:num_prompt_tokens],
        owner=draw(st.integers(1, 3)),
        max_output_tokens=min(num_output_tokens, _MAX_MODEL_LEN - num_prompt_tokens),
        stop_token_ids=draw(st.sampled_from((frozenset(), frozenset(), frozenset({5}), frozenset({1, 17, 30})))),
        ignore_eos=draw(st.booleans()),
        tenant_id=draw(st.sampled_from(("red", "blue"))),
        priority=draw(st.sampled_from((0, 0, 0, 1, -1))),
        cache_salt=draw(st.sampled_from((b"", b"", b"", b"tenant"))),
        deadline=draw(st.sampled_from((None, None, None, 40, 5))),
        prior_outputs=[document[num_prompt_tokens : num_prompt_tokens + count] for count in num_prior],
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=_configs)
    def begin(self, config: SchedulerConfig) -> None:
        sample = greedy(_VOCAB_SIZE) if config.speculation is None else repetitive(_VOCAB_SIZE, period=3)
        self.watched = WatchedScheduler(config, sample, seconds_of=step_times(1e-3, 1e-4, 1e-6, 1e-6, _NOISE))
        self.num_requests = 0

    @rule(requests=st.lists(_requests(), min_size=2, max_size=4))
    def add(self, requests: list[Request]) -> None:
        for request in requests:
            self.num_requests += 1
            named = request_with_id(request, f"r{self.num_requests}", self.watched.now)
            if self.watched.scheduler.load.num_waiting + len(named.choices) > _MAX_WAITING:
                with pytest.raises(Overloaded):
                    self.watched.add(named)
            else:
                self.watched.add(named)

    @precondition(lambda self: self.watched.can_schedule)
    @rule()
    def schedule(self) -> None:
        self.watched.schedule()

    @precondition(lambda self: self.watched.num_in_flight)
    @rule(modulus=st.sampled_from((0, 0, 1, 2, 3)))
    def apply(self, modulus: int) -> None:
        self.watched.apply(lambda handle: modulus > 0 and handle % modulus == 0)

    @precondition(lambda self: self.watched.lives)
    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.watched.fill_pipeline()
            if not self.watched.num_in_flight:
                return
            self.watched.check()
            self.watched.apply()
            self.watched.check()

    @precondition(lambda self: self.watched.can_schedule and self.watched.lives)
    @rule(data=st.data(), what=st.sampled_from(("invalid logits", "abort", "add", "deadline")))
    def step_with_a_surprise(self, data: st.DataObject, what: str) -> None:
        step = self.watched.schedule()
        if step is None:
            return
        handle = data.draw(st.sampled_from(step.output.handles.tolist()))
        if what == "abort":
            self.watched.abort(self.watched.lives[handle].request.request_id, (handle,))
        elif what == "add":
            self.add([data.draw(_requests())])
        elif what == "deadline":
            self.watched.wait(10)
            self.watched.expire()
        self.watched.check()
        self.watched.apply(lambda other: what == "invalid logits" and other == handle)

    @precondition(lambda self: self.watched.lives)
    @rule()
    def run_until_somebody_ends(self) -> None:
        num_ends = len(self.watched.ends)
        for _ in range(self.watched.max_steps_left):
            self.watched.fill_pipeline()
            self.watched.apply()
            self.watched.check()
            if len(self.watched.ends) > num_ends:
                return
        raise AssertionError("nobody ends")

    @precondition(lambda self: self.watched.lives)
    @rule(data=st.data())
    def abort_a_request(self, data: st.DataObject) -> None:
        self.watched.abort(self._any_life(data).request.request_id)

    @precondition(lambda self: self.watched.lives)
    @rule(data=st.data())
    def abort_a_choice(self, data: st.DataObject) -> None:
        life = self._any_life(data)
        self.watched.abort(life.request.request_id, (life.handle, 10_000))

    @precondition(lambda self: len(self.watched.lives) > 3)
    @rule(what=st.sampled_from(("owner", "owner", "everything", "unknown")), owner=st.integers(1, 3))
    def end_many(self, what: str, owner: int) -> None:
        if what == "owner":
            self.watched.abort_owner(owner)
        elif what == "everything":
            self.watched.fail_all(WorkerLost("A worker was lost.", retry_after_seconds=1.0))
        else:
            assert self.watched.abort("unknown") == ()

    @precondition(lambda self: self.watched.lives)
    @rule(data=st.data())
    def refuse_a_request_id_in_use(self, data: st.DataObject) -> None:
        request = make_request(self._any_life(data).request.request_id, (1, 2, 3))
        with pytest.raises(DuplicateRequest):
            self.watched.add(request)

    @rule(seconds=st.integers(0, 6))
    def expire(self, seconds: int) -> None:
        self.watched.wait(seconds)
        self.watched.expire()

    @rule()
    def audit(self) -> None:
        assert self.watched.scheduler.audit() == []

    @invariant()
    def everything_adds_up(self) -> None:
        self.watched.check()

    def teardown(self) -> None:
        if not hasattr(self, "watched"):
            return
        # Nobody starves: when nobody comes any more everybody ends, within a bound.
        self.watched.run_until_idle()
        config = self.watched.config
        num_tokens = min(config.num_blocks * config.block_size, config.max_model_len)
        (handle,) = self.watched.add(make_request("whole pool", range(num_tokens - 1), max_output_tokens=1))
        self.watched.run_until_idle()
        assert handle in self.watched.ends

    def _any_life(self, data: st.DataObject) -> Life:
        return data.draw(st.sampled_from(list(self.watched.lives.values())))


def request_with_id(request: Request, request_id: str, now: float) -> Request:
    """Name a drawn request and turn its time left into a deadline."""
    deadline = None if request.deadline is None else now + request.deadline
    return replace(request, request_id=request_id, deadline=deadline)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = machine_settings(max_examples=160, step_count=30)
