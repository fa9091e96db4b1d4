"""Which sequences draft, how much, and which answers are believed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from libs.errors import InternalError
from services.engine.core.drafting import MAX_PAUSE_TOKENS
from services.engine.core.scheduler import Scheduler
from services.engine.core.scheduler_config import SchedulerConfig, SpeculationConfig
from services.engine.core.scheduler_output import SchedulerOutput, StepResult
from tests.fakes.kv_worker import Sampler, drafts_by_slot, greedy
from tests.fakes.requests import make_request
from tests.fakes.watched_scheduler import WatchedScheduler

_CONFIG = SchedulerConfig(
    num_blocks=40,
    block_size=4,
    max_model_len=100,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_waiting_sequences=8,
    eos_token_ids=(99,),
    max_steps_in_flight=2,
    speculation=SpeculationConfig(),
)
_ROUND = (1, 2, 3, 4, 5)


def round_and_round(digest: int, output_position: int, choice_index: int) -> int:
    """Say 1, 2, 3, 4, 5 over and over."""
    return _ROUND[output_position % len(_ROUND)]


def watched(sample: Sampler = round_and_round, **changes: object) -> WatchedScheduler:
    return WatchedScheduler(replace(_CONFIG, **changes), sample)  # type: ignore[arg-type]


def num_drafts_of(output: SchedulerOutput) -> list[int]:
    return [len(drafts) for drafts in drafts_by_slot(output).values()]


def all_drafts(scheduler: WatchedScheduler, max_steps: int = 300) -> list[list[int]]:
    """Run until nothing is open; returns how many drafts the sequences of each step had."""
    counts: list[list[int]] = []
    for _ in range(max_steps):
        counts += [num_drafts_of(step.output) for step in scheduler.fill_pipeline()]
        if not scheduler.num_in_flight:
            return counts
        scheduler.apply()
        scheduler.check()
    raise AssertionError("no end")


def test_what_is_repeated_comes_several_tokens_at_a_time() -> None:
    scheduler = watched()
    scheduler.add(make_request("a", _ROUND * 2, max_output_tokens=41))

    counts = all_drafts(scheduler)

    # The prompt gives one token, each later step five.
    assert counts == [[0], *[[4]] * 8]
    assert scheduler.num_rejected_drafts == 0


@pytest.mark.parametrize("max_output_tokens", [1, 2, 3, 4, 5, 6])
def test_never_more_tokens_than_asked_for(max_output_tokens: int) -> None:
    scheduler = watched()
    (handle,) = scheduler.add(make_request("a", _ROUND * 2, max_output_tokens=max_output_tokens))

    counts = all_drafts(scheduler)

    assert scheduler.ends[handle].usage.num_output_tokens == max_output_tokens
    # The last token is sampled behind the last draft.
    assert sum(map(sum, counts)) == max(0, max_output_tokens - 2)


def test_a_prompt_that_leaves_three_places_gets_three_tokens() -> None:
    scheduler = watched(speculation=SpeculationConfig(num_draft_tokens=8))
    (handle,) = scheduler.add(make_request("a", [*_ROUND * 19, 1, 2], max_output_tokens=3))

    scheduler.run_until_idle()

    assert scheduler.ends[handle].usage.num_output_tokens == 3


@pytest.mark.parametrize("stop_token_ids", [frozenset({4}), frozenset({2, 4})])
def test_drafts_stop_before_a_token_that_ends_the_output(stop_token_ids: frozenset[int]) -> None:
    scheduler = watched()
    (handle,) = scheduler.add(make_request("a", _ROUND * 2, max_output_tokens=20, stop_token_ids=stop_token_ids))

    all_drafts(scheduler)

    end = scheduler.ends[handle]
    assert end.usage.num_output_tokens == min(stop_token_ids)
    assert end.stop_token_id == min(stop_token_ids)


def test_an_end_token_that_is_ignored_is_drafted() -> None:
    scheduler = watched(eos_token_ids=(4,))
    scheduler.add(make_request("a", _ROUND * 2, max_output_tokens=20, ignore_eos=True))

    all_drafts(scheduler)

    assert scheduler.num_accepted_drafts > 10


def test_drafts_take_what_others_leave_of_the_budget() -> None:
    scheduler = watched(max_num_batched_tokens=16, max_prefill_share=1.0, max_steps_in_flight=1)
    scheduler.add(make_request("a", _ROUND * 2, max_output_tokens=30))
    scheduler.schedule()
    scheduler.apply()
    scheduler.add(make_request("b", range(20, 52), max_output_tokens=1))

    steps = []
    for _ in range(3):
        steps += [step.output for step in scheduler.fill_pipeline()]
        scheduler.apply()

    # The prompt leaves one token of the budget for the other sequence twice; its last two leave room for drafts.
    assert [step.num_tokens for step in steps[:3]] == [16, 16, 7]
    assert [step.num_draft_tokens for step in steps[:3]] == [0, 0, 4]


def test_drafts_never_take_the_blocks_of_others() -> None:
    scheduler = watched(num_blocks=4, enable_prefix_caching=False)
    scheduler.add(make_request("a", _ROUND, max_output_tokens=8))
    scheduler.add(make_request("b", range(20, 23), max_output_tokens=2))

    scheduler.run_until_idle()

    assert scheduler.num_preemptions == 0
    assert scheduler.num_accepted_drafts > 0


def test_without_anything_to_propose_steps_overlap() -> None:
    scheduler = watched(greedy(10_000))
    scheduler.add(make_request("a", range(20), max_output_tokens=60))
    num_overlapped = 0

    while scheduler.scheduler.has_work:
        num_overlapped += len(scheduler.fill_pipeline()) == 2 or scheduler.num_in_flight == 2
        scheduler.apply()

    assert num_overlapped > 55
    assert scheduler.num_rejected_drafts == 0


def test_beside_many_others_nobody_drafts() -> None:
    scheduler = watched(speculation=SpeculationConfig(max_drafting_seqs=2))
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, _ROUND * 2, max_output_tokens=10))

    assert sum(map(sum, all_drafts(scheduler))) == 0


def test_one_that_drafts_and_one_that_does_not_share_every_step() -> None:
    scheduler = watched(
        lambda digest, position, choice: _ROUND[position % 5] if choice else greedy(9_000)(digest, 0, 0)
    )
    scheduler.add(make_request("a", _ROUND * 2, max_output_tokens=30, prior_outputs=[(7,), (1, 2, 3, 4, 5)]))

    counts = all_drafts(scheduler)

    num_shared = sum(len(drafts) == 2 and any(drafts) for drafts in counts)
    num_alone = sum(len(drafts) == 1 and any(drafts) for drafts in counts)
    assert num_shared >= 5
    assert num_alone == 0


def test_after_drafts_that_come_to_nothing_a_sequence_goes_on_without_for_longer_and_longer() -> None:
    # The same three tokens come again and again, and after them another one each time.
    scheduler = watched(lambda digest, position, choice: (1, 2, 3, 10 + position)[position % 4])
    scheduler.add(make_request("a", [1, 2, 3, 4], max_output_tokens=80))

    counts = [drafts[0] for drafts in all_drafts(scheduler)]

    assert scheduler.num_accepted_drafts == 0
    drafting_steps = [index for index, count in enumerate(counts) if count]
    gaps = [later - earlier for earlier, later in itertools.pairwise(drafting_steps)]
    assert gaps == sorted(gaps)
    assert max(gaps) > MAX_PAUSE_TOKENS


def test_rejected_drafts_count_as_computed_and_as_nothing_else() -> None:
    once = (1, 2, 3, 4, 5, 6, 7, 8)
    scheduler = watched(lambda digest, position, choice: once[position])
    (handle,) = scheduler.add(make_request("a", [1, 9, 9, 9, 9, 1], max_output_tokens=2, ignore_eos=True))
    scheduler.run_until_idle()
    usage = scheduler.ends[handle].usage

    assert (usage.num_output_tokens, usage.num_discarded_tokens) == (2, 0)


# ---- answers that do not fit ----


def drafting_step() -> tuple[Scheduler, SchedulerOutput]:
    scheduler = Scheduler(_CONFIG)
    scheduler.add(make_request("a", [*_ROUND, 1, 2], max_output_tokens=20), 0.0)
    first = scheduler.schedule(0.0)
    assert first is not None
    scheduler.apply(result_of(first, [3]), 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    assert step.drafts is not None
    assert step.drafts.token_ids.tolist() == [4, 5, 1, 2]
    return scheduler, step


def result_of(step: SchedulerOutput, token_ids: list[int]) -> StepResult:
    return StepResult(
        step.step_id, step.slots, np.array([len(token_ids)]), np.array(token_ids, np.uint32), (), 0.001
    )


@pytest.mark.parametrize("token_ids", [[], [5, 9], [4, 5, 1, 2, 3, 4]])
def test_tokens_that_were_not_drafted_are_refused(token_ids: list[int]) -> None:
    scheduler, step = drafting_step()

    with pytest.raises(InternalError, match="draft"):
        scheduler.apply(result_of(step, token_ids), 0.0)


@pytest.mark.parametrize("token_ids", [[7], [4, 9], [4, 5, 1, 2, 3]])
def test_drafts_and_the_token_after_them_are_taken(token_ids: list[int]) -> None:
    scheduler, step = drafting_step()

    events = scheduler.apply(result_of(step, token_ids), 0.0)

    assert events.token_ids.tolist() == token_ids
    assert events.num_tokens.tolist() == [len(token_ids)]


def test_more_tokens_than_one_are_refused_where_nothing_was_drafted() -> None:
    scheduler = Scheduler(_CONFIG)
    scheduler.add(make_request("a", _ROUND, max_output_tokens=20), 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None

    with pytest.raises(InternalError, match="no drafts"):
        scheduler.apply(result_of(step, [1, 2]), 0.0)


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="max_ngram_tokens must be at least min_ngram_tokens"):
        SpeculationConfig(min_ngram_tokens=3, max_ngram_tokens=2)
    with pytest.raises(ValueError, match="num_draft_tokens must be at least 1"):
        SpeculationConfig(num_draft_tokens=0)
