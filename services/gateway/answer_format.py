"""What an answer is made of, before it has the shape of an endpoint: the seam between tokens and JSON.

Owns no shape. An endpoint brings one ``AnswerFormat``; streams and whole answers are made from the same deltas.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.gateway.client_call import Framing
from services.gateway.event_template import ChunkTemplate
from services.gateway.generation import FinishReason, TokenLogprob
from services.gateway.output_text import TextDelta


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of an answer repeats."""

    answer_id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Tokens of an answer; ``num_cached_tokens`` is None when the engine could not tell it any more."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None
    # Of the completion's; None for a model that does not reason.
    num_reasoning_tokens: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }
        if self.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        if self.num_reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return usage


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What came of one choice; the choices of all prompts are counted through."""

    choice_index: int
    content: TextDelta
    # Of the content's tokens, and with a choice's first delta of the prompt's; only where they are wanted.
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()

    @property
    def num_logprobs(self) -> int:
        """How many tokens have log-probabilities."""
        return len(self.logprobs) + len(self.prompt_logprobs)


@dataclass(slots=True)
class WholeCall:
    """One call of a tool; its arguments are JSON, or the beginning of it where the answer was cut."""

    name: str
    # Of the choice's text and of its tokens, what came before it began.
    num_characters_before: int
    num_tokens_before: int
    arguments: str = ""


@dataclass(slots=True)
class WholeChoice:
    """One choice, put together from its deltas."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    stop_string: str | None = None
    reasoning_pieces: list[str] = field(default_factory=list)
    calls: list[WholeCall] = field(default_factory=list)
    num_reasoning_tokens: int = 0

    def add(self, delta: ChoiceDelta) -> None:
        """Take the next delta."""
        content = delta.content
        self.pieces.append(content.text)
        self.token_ids += content.token_ids
        self.finish_reason = content.finish_reason
        self.stop_string = content.stop_string
        self.logprobs += delta.logprobs
        self.text_offsets += content.text_offsets
        self.prompt_logprobs += delta.prompt_logprobs
        self.reasoning_pieces.append(content.reasoning)
        self.num_reasoning_tokens = content.num_reasoning_tokens
        for call in content.calls:
            if call.name is not None:
                num_characters = sum(map(len, self.pieces)) - len(content.text) + call.num_characters_before
                self.calls.append(WholeCall(call.name, num_characters, len(self.token_ids)))
            self.calls[call.call_index].arguments += call.arguments

    @property
    def num_logprobs(self) -> int:
        """How many tokens have log-probabilities."""
        return len(self.logprobs) + len(self.prompt_logprobs)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self.reasoning_pieces)


def new_call_id(head: AnswerHead, choice_index: int, call_index: int, *, prefix: str) -> str:
    """Return the id of a call, which no other call of any answer has."""
    return prefix + uuid.uuid5(uuid.NAMESPACE_OID, f"{head.answer_id}/{choice_index}/{call_index}").hex


class AnswerFormat(Protocol):
    """The shape of one answer. It is told every delta in order, or all choices at once."""

    @property
    def framing(self) -> Framing:
        """What a stream has around its events."""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts."""

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the events of a stream for a delta; there may be none."""

    def text_template(self, choice_index: int) -> ChunkTemplate | None:
        """Return the event that shows a choice's next text, where it depends on nothing but that text."""

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return the event with the counts."""

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Return a whole answer."""
