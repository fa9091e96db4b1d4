"""The scheduler at its edges: what it refuses, what it does with answers that do not fit, what it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from libs.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    InternalError,
    InvalidLogits,
    InvalidRequest,
    OctavoError,
    Overloaded,
    RequestNeverFits,
    WorkerLost,
)
from libs.kv import PrefixHash
from libs.kv.block_pool import BlockPool
from services.engine.core.request import Request
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import Admission, SchedulerConfig
from services.engine.core.scheduler_output import SlotFailure, StepResult
from tests.fakes.kv_worker import counting, greedy
from tests.fakes.requests import make_request
from tests.fakes.watched_scheduler import WatchedScheduler

_CONFIG = SchedulerConfig(
    num_blocks=16,
    block_size=16,
    max_model_len=200,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_waiting_sequences=4,
    eos_token_ids=(),
    watermark_fraction=0.0,
    max_prefill_share=0.5,
)


def _watched(**limits: object) -> WatchedScheduler:
    return WatchedScheduler(replace(_CONFIG, **limits), greedy(1000))  # type: ignore[arg-type]  # Limits pass through.


def _run(watched: WatchedScheduler, request: Request) -> list[int]:
    """Serve one request alone; returns the output of its first choice."""
    return _run_choices(watched, request)[0]


def _run_choices(watched: WatchedScheduler, request: Request) -> list[list[int]]:
    """Serve one request alone; returns the output of each choice."""
    outputs: dict[int, list[int]] = {handle: [] for handle in watched.add(request)}
    while watched.schedule() is not None:
        events = watched.apply()
        for handle, output in outputs.items():
            output += events.token_ids[events.handles == handle].tolist()
        watched.check()
    return list(outputs.values())


# ---- what add refuses ----


@pytest.mark.parametrize(
    ("request_", "error", "sentence"),
    [
        pytest.param(make_request("r", []), InvalidRequest, "no tokens", id="an empty prompt"),
        pytest.param(make_request("r", [1], prior_outputs=[]), InvalidRequest, "no choices", id="no choices"),
        pytest.param(
            make_request("r", [1], max_output_tokens=0), InvalidRequest, "max_output_tokens", id="no output"
        ),
        pytest.param(
            make_request("r", [1], max_output_tokens=3, prior_outputs=[[], [5, 5, 5]]),
            InvalidRequest,
            "3 tokens were emitted already",
            id="a choice that is finished",
        ),
        pytest.param(
            make_request("r", [1], prior_outputs=[[5], [5]], choice_indices=(3, 3)),
            InvalidRequest,
            "each needs its own",
            id="one choice twice",
        ),
        pytest.param(
            make_request("r", range(150), max_output_tokens=51), ContextLengthExceeded, "200 tokens", id="too long"
        ),
    ],
)
def test_refuses_what_can_never_be_served(request_: Request, error: type[OctavoError], sentence: str) -> None:
    scheduler = Scheduler(_CONFIG)

    with pytest.raises(error, match=sentence):
        scheduler.add(request_, 0.0)

    assert not scheduler.has_work
    assert scheduler.num_requests == 0


def test_takes_what_fills_the_context_exactly() -> None:
    watched = _watched()

    assert len(_run(watched, make_request("r", range(150), max_output_tokens=50))) == 50


def test_takes_what_fills_the_pool_exactly_and_refuses_one_token_more() -> None:
    watched = _watched(num_blocks=4)

    with pytest.raises(RequestNeverFits, match="65 tokens, but the KV cache holds 64"):
        watched.add(make_request("r", range(60), max_output_tokens=5))
    assert len(_run(watched, make_request("r", range(60), max_output_tokens=4))) == 4


def test_refuses_an_id_in_use_and_takes_it_again_after_the_last_choice_ended() -> None:
    watched = _watched()
    handles = watched.add(make_request("r", [1], prior_outputs=[[], []]))
    watched.abort("r", handles[:1])

    with pytest.raises(DuplicateRequest, match="id r is in use"):
        watched.add(make_request("r", [1]))

    watched.abort("r")
    assert watched.add(make_request("r", [1]))


def test_refuses_more_than_may_wait_and_takes_again_when_some_run() -> None:
    watched = _watched()
    for number in range(4):
        watched.add(make_request(f"r{number}", [1]))

    with pytest.raises(Overloaded, match="4 sequences wait already"):
        watched.add(make_request("r4", [1]))

    watched.schedule()
    assert watched.add(make_request("r4", [1]))


def test_a_request_with_more_choices_than_may_ever_wait_is_not_told_to_try_again() -> None:
    scheduler = Scheduler(_CONFIG)

    with pytest.raises(OctavoError) as refusal:
        scheduler.add(make_request("r", [1], prior_outputs=[[]] * 5), 0.0)

    assert not isinstance(refusal.value, Overloaded)


def test_a_refused_request_takes_no_handle() -> None:
    watched = _watched()
    first = watched.add(make_request("a", [1]))

    with pytest.raises(InvalidRequest):
        watched.add(make_request("b", []))

    assert watched.add(make_request("c", [1])) == (first[0] + 1,)


def test_handles_can_outlive_a_scheduler() -> None:
    handles = iter(range(7, 100))
    assert Scheduler(_CONFIG, handles).add(make_request("a", [1], prior_outputs=[[], []]), 0.0) == (7, 8)

    assert Scheduler(_CONFIG, handles).add(make_request("a", [1]), 0.0) == (9,)


# ---- block borders, served three times and continued ----


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33])
def test_the_same_prompt_gives_the_same_output_from_the_cache(num_tokens: int) -> None:
    watched = _watched()
    prompt = list(range(num_tokens))

    outputs = [_run(watched, make_request(f"r{turn}", prompt, max_output_tokens=5)) for turn in range(3)]

    assert outputs[0] == outputs[1] == outputs[2]
    cached = [end.usage.num_cached_tokens for end in watched.ends.values()]
    assert cached == [0, (num_tokens - 1) // 16 * 16, (num_tokens - 1) // 16 * 16]
    _run(watched, make_request("next turn", [*prompt, *outputs[0], *range(900, 920)]))
    assert list(watched.ends.values())[-1].usage.num_cached_tokens == (num_tokens + 4) // 16 * 16


# ---- aborts ----


def test_abort_after_the_context_was_filled_changes_nothing() -> None:
    watched = _watched()
    _run(watched, make_request("r", range(190), max_output_tokens=10))
    counts = watched.scheduler.kv_cache.block_counts

    assert watched.abort("r") == ()
    assert watched.scheduler.kv_cache.block_counts == counts
    watched.check_idle()


def test_second_abort_finds_nothing() -> None:
    watched = _watched()
    watched.add(make_request("r", range(40)))
    watched.schedule()

    assert len(watched.abort("r")) == 1
    assert watched.abort("r") == ()


def test_abort_of_a_slot_that_is_taken_again_before_the_next_step_hits_nobody_else() -> None:
    watched = _watched(max_num_seqs=1)
    watched.add(make_request("a", range(20)))
    watched.schedule()
    watched.abort("a")
    watched.add(make_request("b", range(100, 120), max_output_tokens=3))

    events = watched.apply()

    assert len(events.handles) == 0
    watched.run_until_idle()
    assert {end.reason for end in watched.ends.values() if end.request_id == "b"} == {"length"}


def test_a_token_sampled_for_nobody_counts_as_discarded() -> None:
    watched = _watched()
    watched.add(make_request("a", range(20)))
    watched.schedule()
    watched.apply()
    watched.schedule()

    (end,) = watched.abort("a")

    assert end.usage.num_output_tokens == 1
    assert end.usage.num_discarded_tokens == 1


def test_a_chunk_that_samples_nothing_discards_nothing() -> None:
    watched = _watched()
    watched.add(make_request("a", range(100)))
    watched.schedule()

    (end,) = watched.abort("a")

    assert end.usage.num_discarded_tokens == 0


def test_a_stream_that_is_gone_takes_all_of_its_requests_with_it() -> None:
    watched = _watched(max_num_seqs=1)
    for owner, request_id in ((1, "a"), (2, "b"), (1, "c")):
        watched.add(make_request(request_id, range(20), owner=owner))
    watched.schedule()

    assert {end.request_id for end in watched.abort_owner(1)} == {"a", "c"}
    assert watched.scheduler.num_requests == 1


# ---- answers that do not fit ----


def _result(step_id: int, slots: list[int], token_ids: list[int], failed_slots: tuple[int, ...] = ()) -> StepResult:
    failures = tuple(SlotFailure(slot, InvalidLogits("The logits are not numbers.")) for slot in failed_slots)
    return StepResult(
        step_id,
        np.array(slots, np.int64),
        np.ones(len(slots), np.int64),
        np.array(token_ids, np.uint32),
        failures,
        0.001,
    )


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(_result(1, [], []), id="a slot without an answer"),
        pytest.param(_result(1, [0, 1], [5, 5]), id="a slot that was not sampled"),
        pytest.param(_result(1, [0], [5, 5]), id="too many tokens"),
        pytest.param(_result(1, [0], [5], (0,)), id="a slot that failed and has a token"),
        pytest.param(_result(1, [0], [5], (6,)), id="a failed slot that was not in the step"),
    ],
)
def test_refuses_a_result_that_does_not_answer_the_step(result: StepResult) -> None:
    scheduler = Scheduler(_CONFIG)
    scheduler.add(make_request("a", range(20)), 0.0)
    scheduler.add(make_request("b", range(100)), 0.0)
    scheduler.schedule(0.0)

    with pytest.raises(InternalError):
        scheduler.apply(result, 1.0)


def test_everything_can_be_ended_after_a_wrong_result() -> None:
    scheduler = Scheduler(_CONFIG)
    scheduler.add(make_request("a", range(20)), 0.0)
    scheduler.schedule(0.0)
    with pytest.raises(InternalError):
        scheduler.apply(_result(1, [], []), 1.0)

    ends = scheduler.fail_all(WorkerLost("A worker was lost.", retry_after_seconds=1.0), 1.0)

    assert len(ends) == 1
    assert scheduler.check_integrity() == []
    assert scheduler.kv_cache.block_counts.num_held == 0
    assert list(scheduler.kv_cache.cached_hashes()) == []


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_no_more_steps_are_sent_than_may_be_in_flight(max_steps_in_flight: int) -> None:
    scheduler = Scheduler(replace(_CONFIG, max_steps_in_flight=max_steps_in_flight))
    scheduler.add(make_request("a", range(20)), 0.0)
    for _ in range(max_steps_in_flight):
        assert scheduler.can_schedule
        scheduler.schedule(0.0)

    assert not scheduler.can_schedule
    with pytest.raises(AssertionError, match=f"{max_steps_in_flight} steps are in flight already"):
        scheduler.schedule(0.0)


def test_an_answer_without_a_step_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="none is in flight"):
        Scheduler(_CONFIG).apply(_result(1, [], []), 0.0)


@pytest.mark.parametrize("step_id", [0, 2])
def test_a_result_of_another_step_is_our_own_mistake(step_id: int) -> None:
    scheduler = Scheduler(_CONFIG)
    scheduler.add(make_request("a", range(20)), 0.0)
    scheduler.schedule(0.0)

    with pytest.raises(AssertionError, match=f"step {step_id} is not 1"):
        scheduler.apply(_result(step_id, [0], [5]), 1.0)


def test_no_block_of_a_sequence_with_invalid_logits_stays_cached() -> None:
    watched = _watched()
    (handle,) = watched.add(make_request("a", range(100)))
    watched.schedule()
    watched.apply()
    watched.schedule()

    watched.apply(lambda failing: failing == handle)

    # Its first chunk was full blocks of the same, perhaps poisoned, contents.
    assert list(watched.scheduler.kv_cache.cached_hashes()) == []


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("No token may come next."), Overloaded("The grammar is late.", retry_after_seconds=1.0)],
    ids=lambda error: type(error).__name__,
)
def test_blocks_of_a_sequence_that_failed_for_another_reason_stay_cached(error: OctavoError) -> None:
    scheduler = Scheduler(_CONFIG)
    scheduler.add(make_request("a", range(100)), 0.0)
    while (output := scheduler.schedule(0.0)) is not None and not output.is_sampled.any():
        scheduler.apply(_result(output.step_id, [], []), 1.0)
    num_cached = len(list(scheduler.kv_cache.cached_hashes()))
    assert output is not None
    result = _result(output.step_id, [], [])

    scheduler.apply(replace(result, failures=(SlotFailure(0, error),)), 1.0)

    assert len(list(scheduler.kv_cache.cached_hashes())) >= num_cached > 0


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_the_token_that_failed_counts_neither_as_output_nor_as_discarded(max_steps_in_flight: int) -> None:
    watched = _watched(max_steps_in_flight=max_steps_in_flight)
    (handle,) = watched.add(make_request("a", range(20), max_output_tokens=9))
    watched.fill_pipeline()
    watched.apply()
    watched.fill_pipeline()

    watched.apply(lambda failing: failing == handle)

    usage = watched.ends[handle].usage
    assert usage.num_output_tokens == 1
    assert usage.num_discarded_tokens == max_steps_in_flight - 1


def test_a_failure_says_what_went_wrong() -> None:
    scheduler = Scheduler(_CONFIG)
    scheduler.add(make_request("a", range(20)), 0.0)
    scheduler.schedule(0.0)
    error = InvalidLogits("A special fault.")

    events = scheduler.apply(
        StepResult(
            1, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint32), (SlotFailure(0, error),), 0.001
        ),
        1.0,
    )

    assert [end.error for end in events.ends] == [error]


@pytest.mark.parametrize(("num_params_bytes", "max_bytes"), [(0, 650), (1_000_000, 2_000_700)])
def test_a_step_tells_of_no_more_than_a_message_holds(
    monkeypatch: pytest.MonkeyPatch, num_params_bytes: int, max_bytes: int
) -> None:
    """All choices could join in one step, each with its prompt and its grammar; no message would hold that."""
    monkeypatch.setattr("services.engine.core.joining_message.MAX_BYTES", max_bytes)
    scheduler = Scheduler(replace(_CONFIG, max_waiting_sequences=8))
    request = make_request("a", range(60), max_output_tokens=2, prior_outputs=[[]] * 4)
    scheduler.add(replace(request, num_params_bytes=num_params_bytes), 0.0)

    joined = []
    while (output := scheduler.schedule(0.0)) is not None:
        joined.append(len(output.new_sequences))
        sampled = output.slots[output.is_sampled].tolist()
        scheduler.apply(_result(output.step_id, sampled, [5] * len(sampled)), 1.0)

    assert joined[:3] == [1, 2, 1]
    assert not scheduler.has_work


# ---- steps in flight ----


def test_the_answer_for_an_earlier_stay_in_a_slot_is_not_taken_for_the_present_one() -> None:
    watched = _watched(num_blocks=4, max_steps_in_flight=2, admission=Admission.WATERMARK, max_prefill_share=1.0)
    watched.add(make_request("first", range(30), max_output_tokens=1))
    (victim,) = watched.add(make_request("victim", range(100, 132), max_output_tokens=4))
    watched.schedule()
    # The last token of the first is being sampled; the other one lacks a block and is preempted for nobody.
    assert watched.schedule() is None
    watched.abort("first")
    watched.add(make_request("urgent", range(200, 210), max_output_tokens=2, priority=1))
    again = watched.schedule()
    assert again is not None
    assert victim in again.admitted

    events = watched.apply()

    assert events.handles.tolist() == []
    watched.check()
    watched.run_until_idle()
    assert watched.ends[victim].usage.num_output_tokens == 4


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_preempted_sequence_comes_back_when_there_is_room_for_its_next_token(max_steps_in_flight: int) -> None:
    watched = _watched(num_blocks=5, max_steps_in_flight=max_steps_in_flight, admission=Admission.WATERMARK)
    watched.add(make_request("a", range(30), max_output_tokens=12))
    (victim,) = watched.add(make_request("b", range(100, 130), max_output_tokens=5))

    watched.run_until_idle()

    assert watched.ends[victim].usage.num_preemptions == 1


def test_an_output_does_not_depend_on_the_number_of_steps_in_flight() -> None:
    outputs = [
        _run(_watched(max_steps_in_flight=number), make_request("a", range(50), max_output_tokens=40))
        for number in (1, 2)
    ]

    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 40


def test_an_end_token_costs_one_token_and_the_limit_none() -> None:
    for stop_at, num_discarded in ((504, 1), (999, 0)):
        watched = WatchedScheduler(replace(_CONFIG, max_steps_in_flight=2, eos_token_ids=(stop_at,)), counting(500))
        (handle,) = watched.add(make_request("a", range(20), max_output_tokens=9))

        watched.run_until_idle()

        assert watched.ends[handle].usage.num_discarded_tokens == num_discarded


def test_nothing_that_is_discarded_can_be_found() -> None:
    watched = WatchedScheduler(replace(_CONFIG, max_steps_in_flight=2, eos_token_ids=(500,)), counting(500))
    # The end token would fill the second block.
    watched.add(make_request("a", range(31), max_output_tokens=9))

    watched.run_until_idle()

    assert len(dict(watched.scheduler.kv_cache.cached_hashes())) == 1


# ---- repair ----


_POOL_DAMAGES: dict[str, Callable[[BlockPool], None]] = {
    "a holder too many": lambda pool: pool._ref_counts.__setitem__(0, 5),
    "a lost holder": lambda pool: pool._ref_counts.__setitem__(0, 0),
    "a wrong number of free blocks": lambda pool: setattr(pool, "_num_unheld", 99),
    "a wrong number of evictable blocks": lambda pool: setattr(pool, "_num_evictable", 7),
    "a queue that goes in a circle": lambda pool: pool._next.__setitem__(14, 14),
    "a queue that holds a held block": lambda pool: pool._next.__setitem__(14, 0),
    "a hash of another block": lambda pool: pool._hashes.__setitem__(0, PrefixHash(b"x" * 32)),
    "a hash map that lost a block": lambda pool: pool._block_of.clear(),
    "a wrong head": lambda pool: setattr(pool, "_head", 14),
}


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("kind", _POOL_DAMAGES)
def test_an_audit_repairs_the_pool_and_everybody_ends_well(kind: str, max_steps_in_flight: int) -> None:
    watched = _watched(max_steps_in_flight=max_steps_in_flight)
    for number, prompt in enumerate((range(40), range(100, 140), range(40))):
        watched.add(make_request(f"r{number}", prompt, max_output_tokens=12))
    for _ in range(3):
        watched.fill_pipeline()
        watched.apply()
    _POOL_DAMAGES[kind](watched.scheduler._manager._pool)

    faults = watched.scheduler.audit()

    assert faults
    watched.check()
    watched.run_until_idle()
    assert {end.reason for end in watched.ends.values()} == {"length"}


# ---- the page table ----


def test_page_table_counts_the_tables_that_list_a_block() -> None:
    watched = _watched()
    watched.add(make_request("a", range(40), max_output_tokens=9, prior_outputs=[[], []]))
    for _ in range(2):
        watched.schedule()
        watched.apply()

    rows = watched.scheduler.page_table("a")

    counts = {(row.handle, row.logical_token_index): row.reference_count for row in rows}
    assert [counts[1, 0], counts[1, 31], counts[1, 32], counts[2, 0], counts[2, 32]] == [2, 2, 1, 2, 1]
    assert len(rows) == 41 + 40


def test_page_table_of_who_does_not_run_is_empty() -> None:
    watched = _watched(max_num_seqs=1)
    watched.add(make_request("a", range(20)))
    watched.add(make_request("b", range(20)))
    watched.schedule()

    assert watched.scheduler.page_table("b") == ()
    assert watched.scheduler.page_table("unknown") == ()


# ---- counts ----


def test_recomputing_after_a_preemption_does_not_count_as_cached() -> None:
    watched = WatchedScheduler(replace(_CONFIG, num_blocks=6, admission=Admission.WATERMARK), counting(500))
    watched.add(make_request("a", range(30), max_output_tokens=24))
    (preempted,) = watched.add(make_request("b", range(100, 130), max_output_tokens=24))

    watched.run_until_idle()

    usage = watched.ends[preempted].usage
    assert usage.num_preemptions == 1
    assert usage.num_cached_tokens == 0
    assert usage.num_output_tokens == 24
    assert usage.num_computed_tokens > 30 + 23


def test_a_resumed_request_gets_the_tokens_that_it_would_have_got() -> None:
    whole = _run(_watched(), make_request("a", range(30), max_output_tokens=12))

    rest = _run(_watched(), make_request("a", range(30), max_output_tokens=12, prior_outputs=[whole[:5]]))

    assert whole[:5] + rest == whole


def test_choices_that_are_left_of_a_request_get_the_tokens_that_they_would_have_got() -> None:
    whole = _run_choices(_watched(), make_request("a", range(30), max_output_tokens=12, prior_outputs=[[]] * 3))

    prior = [whole[2][:5], [], whole[0][:2]]
    resumed = make_request("a", range(30), max_output_tokens=12, prior_outputs=prior, choice_indices=(2, 1, 0))
    rest = _run_choices(_watched(), resumed)

    assert [before + after for before, after in zip(prior, rest, strict=True)] == [whole[2], whole[1], whole[0]]
    assert len({*map(tuple, whole)}) == 3


def test_load_counts_what_waits_and_what_is_left_of_prompts() -> None:
    watched = _watched(max_prefill_share=1.0)
    watched.add(make_request("a", range(20)))
    watched.add(make_request("b", range(100, 250)))
    watched.add(make_request("c", range(300, 310)))
    watched.schedule()
    watched.apply()

    load = watched.scheduler.load

    assert (load.num_running, load.num_waiting) == (2, 1)
    assert load.num_pending_prefill_tokens == (150 - 44) + 10
    assert load.num_available_blocks == 16 - 2 - 3


def test_an_idle_scheduler_has_no_step() -> None:
    scheduler = Scheduler(_CONFIG)

    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_work


@pytest.mark.parametrize("fault", ["a sequence that is nowhere", "a sequence that runs and waits"])
def test_integrity_check_names_a_lost_sequence(fault: str) -> None:
    watched = _watched()
    watched.add(make_request("a", range(20)))
    watched.schedule()
    watched.apply()
    scheduler = watched.scheduler
    sequence = scheduler._table.sequence_at(0)

    if fault == "a sequence that is nowhere":
        scheduler._manager.free(0)
        scheduler._table.give_back(0)
    else:
        scheduler._queue.push(sequence)

    (sentence,) = scheduler.check_integrity()
    assert ("neither running nor waiting" if fault == "a sequence that is nowhere" else "run and wait") in sentence
