"""What another engine is asked after a loss, how often, and what all of them cost together."""

from __future__ import annotations

import pytest

from libs.errors import EngineLost
from libs.kv import HASH_ALGORITHM, HashContract
from services.gateway.choice_progress import ChoiceProgress
from services.gateway.continuation import Endurance, continued, continued_ask
from services.gateway.generation import (
    ChoiceStart,
    EngineUsage,
    FinishReason,
    GenerationFailed,
    GenerationFinished,
)
from services.gateway.peers import PlacementAsk
from tests.unit.gateway.conftest import submission

LOST = GenerationFailed(EngineLost("gone"), None)


def usage(num_output_tokens: int, num_cached_tokens: int = 0, num_discarded_tokens: int = 0) -> EngineUsage:
    return EngineUsage(
        num_cached_tokens,
        num_output_tokens,
        num_discarded_tokens,
        num_preemptions=1,
        queue_seconds=0.5,
        prefill_seconds=0.25,
        decode_seconds=2.0,
    )


def choice(index: int, token_ids: list[int]) -> ChoiceProgress:
    progress = ChoiceProgress(index)
    progress.receive(token_ids, ())
    return progress


def done(index: int, token_ids: list[int]) -> ChoiceProgress:
    progress = choice(index, token_ids)
    progress.end = GenerationFinished(FinishReason.STOP, None, usage(len(token_ids)))
    return progress


def starts(choices: tuple[ChoiceStart, ...]) -> list[tuple[int, list[int]]]:
    return [(start.index, list(start.output_token_ids)) for start in choices]


def test_choices_that_have_ended_or_are_not_wanted_are_not_asked_for_and_the_others_keep_their_index() -> None:
    unwanted = choice(2, [8])
    unwanted.is_unwanted = True

    asked = continued(submission(num_choices=4), [done(0, [1]), choice(1, [2, 3]), unwanted, choice(3, [])])

    assert starts(asked.choices) == [(1, [2, 3]), (3, [])]
    assert asked.prompt_token_ids == submission().prompt_token_ids
    assert asked.sampling_params == submission().sampling_params


def test_what_is_asked_does_not_change_with_what_comes_later() -> None:
    late = choice(0, [1])
    asked = continued(submission(), [late])

    late.receive([2], ())

    assert starts(asked.choices) == [(0, [1])]


@pytest.mark.parametrize(("token_ids", "expected"), [([], 2), ([1], None)])
def test_the_prompts_log_probabilities_are_asked_for_until_they_have_come(
    token_ids: list[int], expected: int | None
) -> None:
    asked = continued(submission(num_logprobs=1, num_prompt_logprobs=2), [choice(0, token_ids)])

    assert asked.sampling_params.num_prompt_logprobs == expected
    assert asked.sampling_params.num_logprobs == 1


def test_a_router_is_told_how_much_is_to_be_computed_like_a_prompt_and_that_somebody_waits() -> None:
    ask = PlacementAsk(
        request_id="r",
        tenant_id="t",
        traceparent=None,
        model_name="m",
        num_prompt_tokens=10,
        max_output_tokens=20,
        prefix_hashes=[],
        hash_contract=HashContract(16, HASH_ALGORITHM, b""),
    )

    moved = continued_ask(ask, [done(0, [1] * 9), choice(1, [1] * 3), choice(2, [1] * 5)])

    assert (moved.num_prompt_tokens, moved.max_output_tokens, moved.priority) == (15, 15, 1)
    assert continued_ask(ask, [choice(0, [])]) == ask


def test_what_was_not_read_is_read_once_and_what_the_lost_engine_still_says_is_not() -> None:
    before = choice(0, [1, 2])
    after = before.for_next_try()

    before.receive([99], ())
    after.receive([3], ())

    assert after.take().token_ids == [1, 2, 3]
    assert list(after.received_token_ids) == [1, 2, 3]
    assert not after.has_news


def test_all_engines_costs_add_up_and_the_prompts_count_once() -> None:
    before = choice(0, [1, 2])
    before.end = GenerationFailed(EngineLost("gone"), usage(2, num_cached_tokens=16, num_discarded_tokens=3))
    after = before.for_next_try()
    after.receive([3], ())
    after.end = GenerationFinished(FinishReason.STOP, None, usage(1, num_cached_tokens=48, num_discarded_tokens=4))

    total = after.usage

    assert total is not None
    assert (total.num_output_tokens, total.num_discarded_tokens, total.num_preemptions) == (3, 7, 2)
    assert (total.num_cached_tokens, total.queue_seconds, total.prefill_seconds) == (16, 0.5, 0.25)
    assert total.decode_seconds == 4.0


def test_of_an_engine_that_told_nothing_the_tokens_that_came_are_known() -> None:
    before = choice(0, [1, 2])
    before.end = LOST
    after = before.for_next_try()
    after.receive([3], ())
    after.end = GenerationFinished(FinishReason.STOP, None, usage(1, num_cached_tokens=48))

    total = after.usage

    assert total is not None
    # What of the prompt the lost engine had cached nobody knows any more.
    assert (total.num_cached_tokens, total.num_output_tokens) == (None, 3)


def test_a_try_without_a_token_says_nothing_of_what_the_prompt_cost() -> None:
    before = ChoiceProgress(0)
    before.end = GenerationFailed(EngineLost("gone"), usage(0, num_cached_tokens=999))
    after = before.for_next_try()
    after.end = GenerationFinished(FinishReason.STOP, None, usage(1, num_cached_tokens=16))

    assert after.usage is not None
    assert after.usage.num_cached_tokens == 16


def test_a_choice_that_nobody_wants_ends_with_its_engine() -> None:
    before = choice(0, [1, 2])
    before.is_unwanted = True
    before.end = GenerationFailed(EngineLost("gone"), usage(2))

    after = before.for_next_try()

    assert isinstance(after.end, GenerationFinished)
    assert after.end.reason is FinishReason.ABORTED
    assert after.usage is not None
    assert after.usage.num_output_tokens == 2


# --- How much a request bears.


def endurance(max_losses_in_row: int = 2, patience_seconds: float = 10.0) -> Endurance:
    return Endurance("r-1", max_losses_in_row, patience_seconds)


def test_only_so_many_losses_are_borne_without_a_token_between_them() -> None:
    bearing = endurance()

    borne = [bearing.bears_loss(after_token=after_token) for after_token in (True, False, True, False, False)]

    assert borne == [True, True, True, True, False]


def test_not_even_tokens_make_a_request_outlive_everybody() -> None:
    bearing = endurance()

    borne = [bearing.bears_loss(after_token=True) for _ in range(20)]

    assert 0 < sum(borne) < 20
    assert not borne[-1]


def test_without_retries_no_loss_is_borne() -> None:
    assert not endurance(max_losses_in_row=0).bears_loss(after_token=True)


def test_refusals_are_borne_for_a_time_with_longer_and_longer_pauses() -> None:
    bearing = endurance(patience_seconds=10.0)
    now, pauses = 100.0, []

    while (pause := bearing.pause_after_refusal(now)) is not None:
        pauses.append(pause)
        now += pause

    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2]
    assert 8.0 < now - 100.0 <= 10.0


def test_a_token_makes_the_patience_new() -> None:
    bearing = endurance(patience_seconds=1.0)
    assert bearing.pause_after_refusal(0.0) is not None
    assert bearing.pause_after_refusal(5.0) is None

    bearing.bears_loss(after_token=True)

    assert bearing.pause_after_refusal(5.0) is not None


def test_who_lost_their_engine_together_again_and_again_go_on_one_after_the_other() -> None:
    pauses: list[float] = []
    for number in range(50):
        bearing = Endurance(f"r-{number}", 2, 10.0)
        bearing.bears_loss(after_token=True)
        assert bearing.pause_after_loss() == 0.0
        bearing.bears_loss(after_token=False)
        pauses.append(bearing.pause_after_loss())

    assert len(set(pauses)) == 50
    assert 0 <= min(pauses) < 0.1 < max(pauses) <= 0.5
