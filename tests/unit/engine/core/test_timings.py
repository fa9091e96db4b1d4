"""What the engine tells of the time of requests that ask: first tokens, cache misses, stalls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from libs.kv import PrefixHash
from services.engine.core.recent_hashes import RecentHashes
from services.engine.core.request import Request, SequenceEnd
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import Admission, SchedulerConfig
from services.engine.core.scheduler_output import StepResult
from services.engine.core.timings import MAX_STALLS, CacheMissReason, FirstToken, StallReason
from tests.fakes.requests import make_request

_CONFIG = SchedulerConfig(
    num_blocks=16,
    block_size=16,
    max_model_len=200,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_waiting_sequences=16,
    eos_token_ids=(),
    watermark_fraction=0.0,
    max_prefill_share=0.5,
)
_BOUND_SECONDS = 0.1


class _Engine:
    """A scheduler whose steps take as long as the test says; every token is a new one."""

    def __init__(self, **settings: object) -> None:
        self.scheduler = Scheduler(replace(_CONFIG, **settings))  # type: ignore[arg-type]  # Settings pass through.
        self.now = 0.0
        self.first_tokens: list[FirstToken] = []
        self.ends: dict[str, SequenceEnd] = {}
        self._next_token = 1000

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)

    def step(self, seconds: float, *, wait_seconds: float = 0.0) -> int:
        """Run a step that takes ``seconds`` in the worker, after a wait; returns its id."""
        output = self.scheduler.schedule(self.now)
        assert output is not None
        self.now += wait_seconds + seconds
        sampled = output.slots[output.is_sampled]
        token_ids = np.arange(self._next_token, self._next_token + len(sampled), dtype=np.uint32)
        self._next_token += len(sampled)
        result = StepResult(output.step_id, sampled, np.ones_like(sampled), token_ids, (), seconds)
        events = self.scheduler.apply(result, self.now)
        self.scheduler.kv_cache.take_changes()
        self.first_tokens += events.first_tokens
        self.ends |= {end.request_id: end for end in events.ends}
        return output.step_id

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step(0.01)


def _asking(request_id: str, prompt: range, *, max_output_tokens: int = 4, **fields: object) -> Request:
    request = make_request(request_id, prompt, max_output_tokens=max_output_tokens, **fields)  # type: ignore[arg-type]  # Fields pass through.
    return replace(request, stall_bound_seconds=_BOUND_SECONDS)


def test_tells_how_long_a_first_token_waited_and_was_computed() -> None:
    engine = _Engine(max_num_seqs=1)
    engine.add(make_request("before", range(20), max_output_tokens=3))
    engine.add(_asking("r", range(100, 200)))
    for _ in range(5):
        engine.step(0.5)

    (first,) = engine.first_tokens

    assert first.queue_seconds == pytest.approx(1.5)
    # 100 tokens are two steps of 64.
    assert first.prefill_seconds == pytest.approx(1.0)
    assert (first.num_cached_tokens, first.misses) == (
        0,
        {CacheMissReason.TAIL: 4, CacheMissReason.NOT_SEEN: 96},
    )


def test_tells_nothing_to_those_who_did_not_ask() -> None:
    engine = _Engine()
    engine.add(make_request("r", range(20), max_output_tokens=2))
    engine.step(1.0)
    engine.step(9.0)

    assert engine.first_tokens == []
    assert engine.ends["r"].usage.num_stalls == 0


@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_reasons_add_up_to_the_computed_tokens(
    num_prompt_tokens: int, num_choices: int, enable_prefix_caching: bool
) -> None:
    engine = _Engine(enable_prefix_caching=enable_prefix_caching)
    for request_id in ("first", "second"):
        engine.add(_asking(request_id, range(num_prompt_tokens), prior_outputs=((),) * num_choices))
        engine.run()

    assert len(engine.first_tokens) == 2 * num_choices
    for first in engine.first_tokens:
        assert sum(first.misses.values()) + first.num_cached_tokens == num_prompt_tokens


def test_a_second_prompt_misses_only_its_tail() -> None:
    engine = _Engine()
    for request_id in ("first", "second"):
        engine.add(_asking(request_id, range(33)))
        engine.run()

    assert engine.first_tokens[1].misses == {CacheMissReason.TAIL: 1}


def test_tells_evicted_blocks_from_those_never_seen() -> None:
    engine = _Engine(num_blocks=8)
    for request_id, prompt in (("a", range(65)), ("b", range(1000, 1100)), ("a again", range(65))):
        engine.add(_asking(request_id, prompt))
        engine.run()

    misses = engine.first_tokens[2].misses

    assert misses[CacheMissReason.EVICTED] > 0
    assert CacheMissReason.NOT_SEEN not in misses


def test_says_that_prompt_logprobs_were_the_reason() -> None:
    engine = _Engine()
    engine.add(_asking("first", range(40)))
    engine.run()
    request = _asking("second", range(40), num_prompt_logprobs=0)
    sequence_misses = _misses_at_start(engine.scheduler, request)

    assert sequence_misses == {CacheMissReason.TAIL: 8, CacheMissReason.PROMPT_LOGPROBS: 32}


def _misses_at_start(scheduler: Scheduler, request: Request) -> dict[CacheMissReason, int]:
    """Start a request and look at what was noted; its log-probabilities are not of interest here."""
    scheduler.add(request, 0.0)
    assert scheduler.schedule(0.0) is not None
    [sequence] = scheduler._sequences[request.request_id]
    assert sequence.timings is not None
    return dict(sequence.timings.misses)


def test_a_long_prompt_of_another_is_the_reason_of_a_stall() -> None:
    engine = _Engine()
    engine.add(_asking("r", range(10), max_output_tokens=5))
    engine.step(0.05)
    engine.step(0.05)
    engine.add(make_request("long", range(100, 130)))
    step_id = engine.step(0.3)
    engine.run()

    usage = engine.ends["r"].usage

    (stall,) = usage.stalls
    assert (stall.step_id, stall.reason, stall.num_prefill_tokens) == (step_id, StallReason.PREFILL, 30)
    assert stall.gap_seconds == pytest.approx(0.3)
    assert stall.step_seconds == 0.3
    assert usage.num_stalls == 1


def test_tells_a_long_step_from_a_wait_of_the_engine() -> None:
    engine = _Engine()
    engine.add(_asking("r", range(10), max_output_tokens=5))
    engine.step(0.05)
    engine.step(0.2)
    engine.step(0.01, wait_seconds=0.4)
    engine.run()

    assert [stall.reason for stall in engine.ends["r"].usage.stalls] == [
        StallReason.LONG_STEP,
        StallReason.ENGINE_WAIT,
    ]


def test_a_preemption_is_the_reason_of_the_gap_that_it_makes() -> None:
    engine = _Engine(num_blocks=4, admission=Admission.WATERMARK)
    engine.add(make_request("old", range(30), max_output_tokens=20))
    engine.add(_asking("young", range(100, 130), max_output_tokens=20))
    engine.run()

    usage = engine.ends["young"].usage

    assert usage.num_preemptions > 0
    assert StallReason.PREEMPTION in [stall.reason for stall in usage.stalls]


def test_keeps_the_first_stalls_and_counts_all() -> None:
    engine = _Engine()
    engine.add(_asking("r", range(10), max_output_tokens=MAX_STALLS + 6))
    while engine.scheduler.has_work:
        engine.step(0.2)

    usage = engine.ends["r"].usage

    assert len(usage.stalls) == MAX_STALLS
    # The first token ends no gap.
    assert usage.num_stalls == MAX_STALLS + 5
    assert usage.stalls[0].step_id == 2


def test_a_slot_that_asked_leaves_no_bound_behind() -> None:
    engine = _Engine(max_num_seqs=1)
    engine.add(_asking("asking", range(10), max_output_tokens=1))
    engine.run()
    engine.add(make_request("silent", range(10), max_output_tokens=3))
    engine.step(1.0)
    engine.step(1.0)
    engine.run()

    assert engine.ends["silent"].usage.num_stalls == 0


def test_recent_hashes_forget_the_oldest_beyond_the_bound() -> None:
    hashes = [PrefixHash(bytes([number])) for number in range(5)]
    recent = RecentHashes(3)

    recent.add(hashes[:4])
    recent.add([hashes[1], hashes[4]])

    assert [one in recent for one in hashes] == [False, True, False, True, True]
    assert len(recent) == 3
