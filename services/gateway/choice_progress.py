"""How far one choice of a request has come, over all engines that had it.

Owns what came and was not read yet, and the output so far, which is what another engine needs to go on with it. It
must not know engines or text.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.generation import (
    ChoiceStep,
    EngineUsage,
    FinishReason,
    GenerationEnd,
    GenerationFailed,
    GenerationFinished,
    TokenLogprob,
)


class Relay(Protocol):
    """Takes tokens at once, so that the reader need not be woken for them."""

    def take(self, token_ids: Sequence[int], now: float) -> bool:
        """Take the tokens of a step; False, with nothing taken, leaves them to the reader."""

    def flush(self) -> None:
        """Hand over what was taken; called before anybody else runs."""


def _no_token_ids() -> array[int]:
    return array("I")


@dataclass(slots=True)
class ChoiceProgress:
    """One choice as it has come so far; ``handle`` and ``end`` are those of the engine that has it now."""

    index: int
    # The output so far, four bytes a token.
    received_token_ids: array[int] = field(default_factory=_no_token_ids)
    # Not read yet.
    pending_token_ids: list[int] = field(default_factory=list)
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)
    handle: int | None = None
    end: GenerationEnd | None = None
    is_end_taken: bool = False
    # Whether the reader wants no more of it.
    is_unwanted: bool = False
    relay: Relay | None = None
    # Before the engine that has it now: the output, and what all others have cost.
    num_earlier_tokens: int = 0
    earlier_usage: EngineUsage | None = None

    @property
    def has_ended_well(self) -> bool:
        """Whether it has an end that is no failure."""
        return isinstance(self.end, GenerationFinished)

    @property
    def is_open(self) -> bool:
        """Whether more is wanted of it, if not of this engine then of another."""
        return not (self.has_ended_well or self.is_unwanted)

    @property
    def has_news(self) -> bool:
        """Whether there is something to read; a failure is not: it may be made good elsewhere."""
        return bool(self.pending_token_ids) or (self.has_ended_well and not self.is_end_taken)

    @property
    def num_received_tokens(self) -> int:
        """Tokens that came, read or not."""
        return len(self.received_token_ids)

    @property
    def has_new_tokens(self) -> bool:
        """Whether any came from the engine that has it now."""
        return len(self.received_token_ids) > self.num_earlier_tokens

    @property
    def usage(self) -> EngineUsage | None:
        """What all engines say that it cost; None while it goes on, or where none could tell."""
        if self.end is None or self.earlier_usage is None:
            return None if self.end is None else self.end.usage
        return self.earlier_usage.plus_try(self._usage_of_this_try())

    def relayed(self, token_ids: list[int], now: float) -> Relay | None:
        """Give tokens to the relay and return it; None where there is none, or others wait, or it is full."""
        relay = self.relay
        if relay is None or self.pending_token_ids or not relay.take(token_ids, now):
            return None
        self.received_token_ids.fromlist(token_ids)
        return relay

    def receive(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Keep tokens for the reader."""
        self.received_token_ids.fromlist(token_ids)
        self.pending_token_ids += token_ids
        self.pending_logprobs += logprobs

    def take(self) -> ChoiceStep:
        """Read what has come since the last time; a good end is given once."""
        token_ids, self.pending_token_ids = self.pending_token_ids, []
        logprobs, self.pending_logprobs = self.pending_logprobs, []
        end = self.end if isinstance(self.end, GenerationFinished) else None
        self.is_end_taken = end is not None
        return ChoiceStep(self.index, token_ids, end, logprobs)

    def for_next_try(self) -> ChoiceProgress:
        """Return the same choice for another engine; what the one before still says is not seen any more.

        One that has ended well or that nobody wants more of is over.
        """
        if self.has_ended_well:
            return self
        relay, self.relay = self.relay, None
        usage = self._usage_of_this_try()
        earlier_usage = self.earlier_usage
        if self.received_token_ids:
            # What the prompt cost is what it cost where the first token came from.
            earlier_usage = usage if earlier_usage is None else earlier_usage.plus_try(usage)
        return dataclasses.replace(
            self,
            received_token_ids=self.received_token_ids[:],
            pending_token_ids=[*self.pending_token_ids],
            pending_logprobs=[*self.pending_logprobs],
            handle=None,
            end=GenerationFinished(FinishReason.ABORTED, None, usage) if self.is_unwanted else None,
            relay=relay,
            num_earlier_tokens=self.num_received_tokens,
            earlier_usage=self.earlier_usage if self.is_unwanted else earlier_usage,
        )

    def _usage_of_this_try(self) -> EngineUsage:
        told = None if self.end is None else self.end.usage
        return told or EngineUsage.untold(self.num_received_tokens - self.num_earlier_tokens)


def failure_of(choices: Sequence[ChoiceProgress]) -> GenerationFailed | None:
    """Return the failure of the first choice that has failed."""
    return next((choice.end for choice in choices if isinstance(choice.end, GenerationFailed)), None)
