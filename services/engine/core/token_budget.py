"""What a step may still compute: in tokens, and in predicted seconds."""

from __future__ import annotations

from services.engine.core.step_cost import StepCostModel, StepWork


class TokenBudget:
    """Scratch state of one scheduling pass. Decodes are always granted; prompts get what is left.

    In company, where anyone else runs or waits, prompts together take at most their share of a step: short steps
    let those that decode go on, and the first in line have its first token before the second begins. For the same
    reason a step in which a prompt ends takes others only whole: a part of one would make the first token of the
    other late and have none of its own. A prompt that is alone disturbs nobody and takes all. With a target for the
    inter-token latency, and while somebody decodes, a step takes prompt tokens only as far as its predicted time
    allows, but always a few: a target that cannot be met must not starve prompts.
    """

    def __init__(
        self,
        max_num_tokens: int,
        *,
        min_chunk_tokens: int,
        max_share: float,
        is_in_company: bool,
        target_seconds: float | None,
        cost_model: StepCostModel,
    ) -> None:
        self.num_tokens_left = max_num_tokens
        self._min_chunk_tokens = min_chunk_tokens
        self._max_share = max_share
        self._max_prompt_tokens = self._share_of(max_num_tokens) if is_in_company else max_num_tokens
        self._is_shared = self._max_prompt_tokens < max_num_tokens
        self._num_prompt_tokens_left = self._max_prompt_tokens
        self._target_seconds = target_seconds if cost_model.is_fitted else None
        self._cost_model = cost_model
        self._seconds_left: float | None = None
        self._has_granted_chunk = False
        self._has_ended_prompt = False

    def take_decodes(self, num_tokens: int, context_tokens: int) -> None:
        """Take what single-token rows need."""
        self.num_tokens_left -= num_tokens
        if self._target_seconds is not None and num_tokens:
            work = StepWork(num_tokens, context_tokens, 0)
            self._seconds_left = self._target_seconds - self._cost_model.predict_seconds(work)

    def grant_drafts(self, num_wanted: int, *, num_computed_tokens: int) -> int:
        """Take and return the drafts that a sequence computes behind its token, of what everyone else left."""
        granted = min(num_wanted, self.num_tokens_left)
        if self._seconds_left is not None and granted > 0:
            granted = min(granted, self._affordable(num_computed_tokens))
            self._pay(granted, num_computed_tokens)
        self.num_tokens_left -= granted
        return granted

    @property
    def has_room_for_prompts(self) -> bool:
        """Whether a prompt can still be granted a token."""
        return min(self.num_tokens_left, self._num_prompt_tokens_left) > 0

    def grant_chunk(self, num_pending_tokens: int, *, num_computed_tokens: int, yields: bool) -> int:
        """Take and return the tokens that a prompt computes in this step; none when the budget is used up.

        One that yields, to a shorter prompt behind it, takes at most its share of what prompts may take.
        """
        granted = min(num_pending_tokens, self.num_tokens_left, self._num_prompt_tokens_left)
        if granted < num_pending_tokens and self._has_ended_prompt and self._is_shared:
            return 0
        if yields:
            granted = min(granted, self._share_of(self._max_prompt_tokens))
        if self._seconds_left is not None and granted > 0:
            floor = 0 if self._has_granted_chunk else self._min_chunk_tokens
            granted = min(granted, max(self._affordable(num_computed_tokens), floor))
            self._pay(granted, num_computed_tokens)
        self._has_granted_chunk |= granted > 0
        self._has_ended_prompt |= granted == num_pending_tokens
        self.num_tokens_left -= granted
        self._num_prompt_tokens_left -= granted
        return granted

    def _share_of(self, num_tokens: int) -> int:
        return max(self._min_chunk_tokens, int(num_tokens * self._max_share))

    def _affordable(self, num_computed_tokens: int) -> int:
        """Return the tokens of one sequence for which the step's time suffices."""
        assert self._seconds_left is not None, "nothing bounds the step's time"
        return self._cost_model.max_chunk_tokens(self._seconds_left, num_computed_tokens=num_computed_tokens)

    def _pay(self, num_tokens: int, num_computed_tokens: int) -> None:
        assert self._seconds_left is not None, "nothing bounds the step's time"
        pairs = num_tokens * num_computed_tokens + num_tokens * num_tokens // 2
        without_constant = self._cost_model.predict_seconds(StepWork(num_tokens, 0, pairs))
        self._seconds_left -= without_constant - self._cost_model.predict_seconds(StepWork(0, 0, 0))
