"""Scorers: how good each candidate is, each in [0, 1], added by weight. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.router.policy.facts import Candidate, PlacementRequest, ScoredCandidate, ScorerShare


class Scorer(Protocol):
    """Rates candidates."""

    @property
    def name(self) -> str:
        """Its name in explanations."""

    @property
    def weight(self) -> float:
        """How much it counts."""

    def score(self, candidates: Sequence[Candidate], request: PlacementRequest) -> list[float]:
        """Return one score in [0, 1] for each candidate; higher is better."""


@dataclass(frozen=True, slots=True)
class PredictedWait:
    """Rates the predicted wait against the shortest one: 1 for the shortest, 0.5 for about twice as long.

    Args:
        weight: how much it counts.
        tolerance_seconds: a difference that a user does not notice, added to both sides of the ratio.
    """

    weight: float
    tolerance_seconds: float
    name: str = "predicted_wait"

    def score(self, candidates: Sequence[Candidate], request: PlacementRequest) -> list[float]:
        """Compare each wait with the shortest."""
        waits = [candidate.forecast.wait_seconds + self.tolerance_seconds for candidate in candidates]
        shortest = min(waits)
        return [shortest / wait for wait in waits]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Rates the share of the prompt that is cached.

    The time saved for this request is part of its predicted wait already. This share is for the others: what is
    not computed twice leaves room in time and in the other engines' caches. With weights w for this scorer and 1
    for the wait, a fully cached prompt is worth a wait that is longer by the factor 1 / (1 - w).
    """

    weight: float
    name: str = "prefix_match"

    def score(self, candidates: Sequence[Candidate], request: PlacementRequest) -> list[float]:
        """Divide cached by prompt tokens."""
        num_prompt_tokens = max(1, request.num_prompt_tokens)
        return [candidate.forecast.num_cached_tokens / num_prompt_tokens for candidate in candidates]


def score_candidates(
    scorers: Sequence[Scorer], candidates: Sequence[Candidate], request: PlacementRequest
) -> list[ScoredCandidate]:
    """Add the scorers' weighted shares, so that the best possible total is 1."""
    total_weight = sum(scorer.weight for scorer in scorers)
    columns = [(scorer, scorer.score(candidates, request)) for scorer in scorers]
    scored = []
    for index, candidate in enumerate(candidates):
        shares = tuple(
            ScorerShare(scorer.name, scores[index] * scorer.weight / total_weight) for scorer, scores in columns
        )
        scored.append(ScoredCandidate(candidate, sum(share.score for share in shares), shares))
    return scored
