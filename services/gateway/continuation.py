"""What a request needs to go on with another engine, and how much of that it bears. Pure; the clock is passed in.

An engine computes the prompt and the output so far as one prompt; that output counts for limits, penalties, the
grammar and draws, so the next token is the one that the lost engine would have given.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.gateway.choice_progress import ChoiceProgress
from services.gateway.generation import ChoiceStart, Submission
from services.gateway.peers import PlacementAsk

# Engines that one request may lose in all, however many tokens came from each.
_MAX_LOSSES: Final = 8
_FIRST_PAUSE_SECONDS: Final = 0.25
_MAX_PAUSE_SECONDS: Final = 2.0
_MAX_SPREAD_SECONDS: Final = 0.5


def continued(submission: Submission, choices: Sequence[ChoiceProgress]) -> Submission:
    """Return what another engine is asked: the choices that have not ended, each with its output so far."""
    params = submission.sampling_params
    if any(choice.num_received_tokens for choice in choices):
        # Those of the prompt came with the first token, or before it.
        params = dataclasses.replace(params, num_prompt_logprobs=None)
    return dataclasses.replace(
        submission,
        sampling_params=params,
        choices=tuple(
            ChoiceStart(choice.index, choice.received_token_ids[:]) for choice in choices if choice.is_open
        ),
    )


def continued_ask(ask: PlacementAsk, choices: Sequence[ChoiceProgress]) -> PlacementAsk:
    """Return what a router is asked: the output so far is to be computed like a prompt.

    Whoever watches a stream waits for it now, so it goes before those who have nothing yet.
    """
    num_output_tokens = max((choice.num_received_tokens for choice in choices if choice.is_open), default=0)
    return dataclasses.replace(
        ask,
        num_prompt_tokens=ask.num_prompt_tokens + num_output_tokens,
        max_output_tokens=ask.max_output_tokens - num_output_tokens,
        priority=ask.priority + (1 if num_output_tokens else 0),
    )


@dataclass(slots=True)
class Endurance:
    """How many losses a request bears, and how long it waits for an engine after one.

    A request that kills whoever computes it must not go round all engines, so only so many losses are borne without
    a token between them (``max_losses_in_row``), and so many in all. To be refused, by an engine that loads its
    model again or by a router that knows none, is no loss: it is borne for ``patience_seconds``.
    """

    request_id: str
    max_losses_in_row: int
    patience_seconds: float
    _num_losses: int = 0
    _num_losses_in_row: int = 0
    _num_refusals: int = 0
    _waits_since: float | None = None

    @property
    def has_lost(self) -> bool:
        """Whether an engine was lost that had taken the request: since then it is worth waiting."""
        return self._num_losses > 0

    def bears_loss(self, *, after_token: bool) -> bool:
        """Count the loss of an engine that had taken the request; False when it was one too many."""
        self._num_losses += 1
        self._num_losses_in_row = 1 if after_token else self._num_losses_in_row + 1
        if after_token:
            self._num_refusals, self._waits_since = 0, None
        return self._num_losses_in_row <= self.max_losses_in_row and self._num_losses <= _MAX_LOSSES

    def pause_after_loss(self) -> float:
        """Return how long to wait before the next engine is asked, in seconds.

        Not at all after the first loss in a row. After a second it may be this request that kills, or another that
        ran beside it. Those go on at different times, so that most have a token, and so are innocent, when the one
        at fault comes again.
        """
        digest = hashlib.blake2b(f"{self.request_id}/{self._num_losses}".encode(), digest_size=4).digest()
        spread = int.from_bytes(digest) / 2**32
        return (self._num_losses_in_row - 1) * spread * _MAX_SPREAD_SECONDS

    def pause_after_refusal(self, now: float) -> float | None:
        """Count a refusal and return how long to wait before the next try, in seconds; None when it was enough."""
        if self._waits_since is None:
            self._waits_since = now
        pause = min(_FIRST_PAUSE_SECONDS * 2**self._num_refusals, _MAX_PAUSE_SECONDS)
        self._num_refusals += 1
        return pause if now + pause < self._waits_since + self.patience_seconds else None
