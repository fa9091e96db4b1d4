"""What a step may compute: decodes always, prompts as far as tokens, shares and the predicted time go."""

from __future__ import annotations

import itertools

import pytest

from services.engine.core.step_cost import StepCostModel, StepWork
from services.engine.core.token_budget import TokenBudget


def _cost_model(per_step: float = 1e-3, per_token: float = 1e-4, per_pair: float = 0.0) -> StepCostModel:
    """Return a model that has seen steps of this cost."""
    model = StepCostModel()
    for num_tokens, num_pairs in itertools.product((1, 7, 64, 200), (0, 300, 5_000, 40_000)):
        work = StepWork(num_tokens, 0, num_pairs)
        model.note(work, per_step + per_token * num_tokens + per_pair * num_pairs)
    return model


def _budget(
    max_num_tokens: int = 64,
    *,
    max_share: float = 0.5,
    is_in_company: bool = False,
    target_seconds: float | None = None,
    cost_model: StepCostModel | None = None,
) -> TokenBudget:
    return TokenBudget(
        max_num_tokens,
        min_chunk_tokens=16,
        max_share=max_share,
        is_in_company=is_in_company,
        target_seconds=target_seconds,
        cost_model=cost_model or _cost_model(),
    )


def _grant(budget: TokenBudget, num_pending: int, *, num_computed: int = 0, yields: bool = False) -> int:
    return budget.grant_chunk(num_pending, num_computed_tokens=num_computed, yields=yields)


def test_a_prompt_alone_gets_the_whole_step() -> None:
    budget = _budget()

    assert _grant(budget, 200) == 64
    assert budget.num_tokens_left == 0
    assert _grant(budget, 5) == 0


def test_a_prompt_gets_no_more_than_it_needs() -> None:
    budget = _budget()

    assert _grant(budget, 10) == 10
    assert budget.num_tokens_left == 54


def test_decodes_come_first() -> None:
    budget = _budget()

    budget.take_decodes(60, 10_000)

    assert _grant(budget, 200) == 4


@pytest.mark.parametrize(("max_share", "granted"), [(1.0, 64), (0.5, 32), (0.3, 19), (0.1, 16)])
def test_in_company_prompts_get_their_share_together_but_a_block_at_least(max_share: float, granted: int) -> None:
    budget = _budget(max_share=max_share, is_in_company=True)

    assert budget.has_room_for_prompts
    assert _grant(budget, 200) == granted
    assert not budget.has_room_for_prompts
    assert _grant(budget, 200) == 0
    assert budget.num_tokens_left == 64 - granted


def test_one_that_yields_leaves_room_within_what_prompts_may_take() -> None:
    budget = _budget(128, is_in_company=True)

    assert _grant(budget, 200, yields=True) == 32
    assert _grant(budget, 100) == 32


def test_where_a_prompt_ends_others_come_whole_or_not_at_all() -> None:
    budget = _budget(128, is_in_company=True)

    assert _grant(budget, 30) == 30
    assert _grant(budget, 35) == 0
    assert _grant(budget, 20) == 20
    assert _grant(budget, 200) == 0
    assert _grant(budget, 14) == 14


def test_prompts_without_a_share_of_their_own_come_in_parts() -> None:
    budget = _budget(64, max_share=1.0, is_in_company=True)

    assert _grant(budget, 30) == 30
    assert _grant(budget, 200) == 34


def test_a_share_never_exceeds_what_is_left() -> None:
    budget = _budget(is_in_company=True)
    budget.take_decodes(60, 0)

    assert _grant(budget, 200, yields=True) == 4
    assert not budget.has_room_for_prompts


def test_prompts_take_the_time_that_decodes_leave() -> None:
    # 5 ms, less 1 ms for the step and 1 ms for ten decodes, are 30 tokens.
    budget = _budget(target_seconds=0.005)
    budget.take_decodes(10, 0)

    granted = _grant(budget, 200)

    assert granted in (29, 30)
    # The second prompt finds no time left, and is no longer owed its block.
    assert _grant(budget, 200) == 0


def test_time_is_shared_by_several_prompts() -> None:
    budget = _budget(target_seconds=0.005)
    budget.take_decodes(10, 0)

    grants = [_grant(budget, 12) for _ in range(4)]

    assert grants[:2] == [12, 12]
    assert grants[2] in (5, 6)
    assert grants[3] == 0


def test_context_that_was_computed_makes_tokens_dearer() -> None:
    model = _cost_model(per_pair=1e-6)
    grants = []
    for num_computed in (0, 100, 1_000):
        budget = _budget(target_seconds=0.006, cost_model=model)
        budget.take_decodes(1, 0)
        grants.append(_grant(budget, 200, num_computed=num_computed))

    assert grants[0] > grants[1] > grants[2] >= 16


@pytest.mark.parametrize("target_seconds", [1e-9, 0.001, 0.0012])
def test_a_target_that_cannot_be_met_still_grants_a_block(target_seconds: float) -> None:
    budget = _budget(target_seconds=target_seconds)
    budget.take_decodes(1, 0)

    assert _grant(budget, 200) == 16
    assert _grant(budget, 200) == 0


def test_the_target_binds_only_while_somebody_decodes() -> None:
    budget = _budget(target_seconds=0.001)
    budget.take_decodes(0, 0)

    assert _grant(budget, 200) == 64


def test_the_target_binds_only_once_the_model_is_fitted() -> None:
    budget = _budget(target_seconds=0.001, cost_model=StepCostModel())
    budget.take_decodes(1, 0)

    assert _grant(budget, 200) == 63


def test_grants_add_up_to_the_step() -> None:
    budget = _budget(100, max_share=0.75, is_in_company=True)
    budget.take_decodes(30, 0)

    grants = [_grant(budget, 1_000, yields=True) for _ in range(3)]

    # Prompts may take 75 together, one of them 56, and all of them no more than the step has left.
    assert grants == [56, 14, 0]


def test_drafts_get_what_is_left() -> None:
    budget = _budget(10)
    budget.take_decodes(3, 30)
    budget.grant_chunk(4, num_computed_tokens=0, yields=False)

    assert budget.grant_drafts(2, num_computed_tokens=10) == 2
    assert budget.grant_drafts(4, num_computed_tokens=10) == 1
    assert budget.grant_drafts(4, num_computed_tokens=10) == 0


def test_drafts_take_no_more_than_the_time_that_is_left() -> None:
    # A millisecond for the step, a tenth of one for each token.
    budget = _budget(target_seconds=1.65e-3, cost_model=_cost_model())
    budget.take_decodes(1, 0)

    assert budget.grant_drafts(8, num_computed_tokens=0) == 5
    assert budget.grant_drafts(8, num_computed_tokens=0) == 0
