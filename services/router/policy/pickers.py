"""Pickers: which of the scored candidates takes the request. Pure; no randomness, so that a run can be repeated."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.policy.facts import ScoredCandidate

# Scores nearer than this differ by rounding only.
_SCORE_TOLERANCE = 1e-9


class HighestScorePicker:
    """Picks the highest score; among equals the fewest placed requests, then each in turn."""

    def __init__(self) -> None:
        self._num_ties = 0

    def pick(self, scored: Sequence[ScoredCandidate]) -> ScoredCandidate:
        """Return the winner of at least one candidate."""
        assert scored, "a picker needs a candidate"
        highest = max(item.score for item in scored)
        best = [item for item in scored if item.score >= highest - _SCORE_TOLERANCE]
        fewest = min(item.candidate.engine.num_placed_requests for item in best)
        equals = [item for item in best if item.candidate.engine.num_placed_requests == fewest]
        if len(equals) == 1:
            return equals[0]
        equals.sort(key=lambda item: item.candidate.engine.engine_id)
        winner = equals[self._num_ties % len(equals)]
        self._num_ties += 1
        return winner
