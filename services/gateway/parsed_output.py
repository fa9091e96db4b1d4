"""One choice's text with its markers read: what is content, what is reasoning, what are calls of tools.

Owns the count of reasoning tokens. It must not know which markers a model has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain

from services.gateway.generation import FinishReason, GenerationFinished
from services.gateway.model_formats.model_format import AnswerParser
from services.gateway.model_formats.parsed import CallDelta
from services.gateway.model_formats.reasoning import ReasoningState
from services.gateway.output_text import NoOutput, OutputText, TextDelta


class ParsedOutput:
    """A ``ChoiceOutput`` around another whose text is read. What stops an answer does not stop its reasoning."""

    def __init__(self, output: OutputText | NoOutput, parser: AnswerParser, *, shows_reasoning: bool) -> None:
        self._output = output
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self._num_calls = 0
        self._num_reasoning_tokens = 0
        # Tokens from which it cannot be told yet whether they begin reasoning.
        self._num_undecided_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens taken until the end."""
        return self._output.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of them that were reasoning, its markers included."""
        return self._num_reasoning_tokens

    def take(self, token_ids: Sequence[int], end: GenerationFinished | None) -> TextDelta:
        """Take the next tokens; one by one while they may be reasoning, so that they can be counted."""
        deltas: list[TextDelta] = []
        num_taken = 0
        while num_taken < len(token_ids) and self._parser.reasoning_state is not ReasoningState.OVER:
            state = self._parser.reasoning_state
            is_last = num_taken == len(token_ids) - 1
            taken = self._output.take(
                [token_ids[num_taken]],
                end if is_last else None,
                may_stop=state is not ReasoningState.OPEN,
            )
            deltas.append(self._read(taken))
            self._count(state)
            num_taken += 1
            if deltas[-1].finish_reason is not None:
                return self._joined(deltas)
        if num_taken < len(token_ids) or not deltas:
            deltas.append(self._read(self._output.take(token_ids[num_taken:], end)))
        return self._joined(deltas)

    def _read(self, delta: TextDelta) -> TextDelta:
        is_cut = delta.finish_reason is FinishReason.LENGTH or delta.stop_string is not None
        parsed = self._parser.add(delta.text, is_last=delta.finish_reason is not None, is_cut=is_cut)
        self._num_calls += sum(call.name is not None for call in parsed.calls)
        return TextDelta(
            parsed.content,
            delta.token_ids,
            delta.finish_reason,
            delta.text_offsets,
            delta.stop_string,
            reasoning=parsed.reasoning if self._shows_reasoning else "",
            calls=parsed.calls,
        )

    def _count(self, before: ReasoningState) -> None:
        """Count a token by where the text was before it and is after it."""
        match before, self._parser.reasoning_state:
            case ReasoningState.POSSIBLE, ReasoningState.POSSIBLE:
                self._num_undecided_tokens += 1
            case ReasoningState.POSSIBLE, ReasoningState.OVER:
                self._num_undecided_tokens = 0
            case _:
                self._num_reasoning_tokens += 1 + self._num_undecided_tokens
                self._num_undecided_tokens = 0

    def _joined(self, deltas: Sequence[TextDelta]) -> TextDelta:
        last = deltas[-1]
        return TextDelta(
            "".join(delta.text for delta in deltas),
            [*chain.from_iterable(delta.token_ids for delta in deltas)],
            last.finish_reason,
            [*chain.from_iterable(delta.text_offsets for delta in deltas)],
            last.stop_string,
            reasoning="".join(delta.reasoning for delta in deltas),
            calls=tuple(_calls_of(deltas)),
            num_calls=self._num_calls,
            num_reasoning_tokens=self._num_reasoning_tokens,
        )


def _calls_of(deltas: Sequence[TextDelta]) -> Iterator[CallDelta]:
    """Give the calls of deltas that are joined, each at its place in the joined text."""
    num_before = 0
    for delta in deltas:
        for call in delta.calls:
            yield dataclasses.replace(call, num_characters_before=num_before + call.num_characters_before)
        num_before += len(delta.text)
