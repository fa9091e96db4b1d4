"""From output tokens to the text that a client may see.

Owns whole characters, stop strings and the count of tokens that a client pays for. It must not know HTTP or
engines. However tokens are cut into steps, the same text comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from libs.text import IncrementalDetokenizer, Tokenizer
from services.gateway.generation import FinishReason, GenerationFinished
from services.gateway.generation_options import GenerationOptions
from services.gateway.model_formats.parsed import CallDelta
from services.gateway.stop_strings import StopStringMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became certain, the tokens that were taken for it, and why the output is over if it is."""

    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    # For each token, how much text was certain before it; only where log-probabilities are wanted.
    text_offsets: Sequence[int] = ()
    # The stop string that ended the output.
    stop_string: str | None = None
    # What was read out of the text, where it has marks that are read.
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    # Of the whole choice so far: calls that have begun, and tokens that were reasoning.
    num_calls: int = 0
    num_reasoning_tokens: int = 0


class ChoiceOutput(Protocol):
    """What becomes of one choice's tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens taken until the end: what the client pays for."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Those of them that were reasoning; None where that is not told apart."""

    def take(self, token_ids: Sequence[int], end: GenerationFinished | None) -> TextDelta:
        """Take the next tokens; what comes after the end of the text is surplus and not counted."""


class OutputText:
    """One choice's text, with the text of ``kept_token_ids`` also where control tokens are skipped."""

    num_reasoning_tokens = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: GenerationOptions,
        *,
        is_continued: bool = False,
        kept_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, options.skips_special_tokens, is_continued=is_continued, kept_token_ids=kept_token_ids
        )
        self._includes_stop = options.includes_stop_string
        self._matcher: StopStringMatcher | None = None
        if options.stop_strings:
            self._matcher = StopStringMatcher(options.stop_strings, include_stop_str=self._includes_stop)
        # Control tokens are no text where they are skipped, and end it all the same where one is a stop string.
        self._ends: dict[int, str] = {}
        if options.skips_special_tokens:
            named = ((tokenizer.control_token_id(text), text) for text in options.stop_strings)
            self._ends = {token_id: text for token_id, text in named if token_id is not None}
        self._min_output_tokens = options.min_output_tokens
        # White space behind what may not stop the output is no beginning of what may.
        self._skips_space = False
        self._num_tokens = 0
        self._num_characters = 0
        # Where nothing depends on single tokens, all of a step are decoded at once.
        self._is_token_by_token = self._matcher is not None or options.num_logprobs is not None

    @property
    def num_tokens(self) -> int:
        """Tokens taken until the end, the one that completed a stop string included."""
        return self._num_tokens

    @property
    def is_plain(self) -> bool:
        """Whether only the text of tokens is wanted, and nothing is looked for in it."""
        return not self._is_token_by_token

    @property
    def is_settled(self) -> bool:
        """Whether the next token's text depends on nothing before it."""
        return self._detokenizer.is_settled

    def pass_by(self, num_tokens: int) -> None:
        """Count tokens that were whole characters and are shown already; only where it is plain and settled."""
        self._num_tokens += num_tokens

    def take(self, token_ids: Sequence[int], end: GenerationFinished | None, *, may_stop: bool = True) -> TextDelta:
        """Take the next tokens; what comes after a stop string is surplus and not counted.

        Without ``may_stop`` no stop string is looked for in them.
        """
        shown = self._shown(token_ids, end)
        self._skips_space |= not may_stop
        if not self._is_token_by_token:
            self._num_tokens += len(token_ids)
            return self._delta(self._detokenizer.add(shown), token_ids, (), end)
        pieces: list[str] = []
        offsets: list[int] = []
        for index, token_id in enumerate(shown):
            self._num_tokens += 1
            offsets.append(self._num_characters)
            may_match = may_stop and self._num_tokens >= self._min_output_tokens
            if may_match and token_id in self._ends:
                return self._ended_by(self._ends[token_id], pieces, token_ids[: index + 1], offsets)
            text = self._detokenizer.add([token_id])
            self._num_characters += len(text)
            piece, matched = self._match(text, may_match=may_match)
            pieces.append(piece)
            if matched is not None:
                return TextDelta("".join(pieces), token_ids[: index + 1], FinishReason.STOP, offsets, matched)
        offsets += [self._num_characters] * (len(token_ids) - len(shown))
        self._num_tokens += len(token_ids) - len(shown)
        return self._delta("".join(pieces), token_ids, offsets, end)

    def _delta(
        self, text: str, token_ids: Sequence[int], offsets: Sequence[int], end: GenerationFinished | None
    ) -> TextDelta:
        if end is None:
            return TextDelta(text, token_ids, None, offsets)
        last, matched = self._last()
        reason = end.reason if matched is None else FinishReason.STOP
        return TextDelta(text + last, token_ids, reason, offsets, matched)

    def _ended_by(
        self, control_text: str, pieces: Sequence[str], token_ids: Sequence[int], offsets: Sequence[int]
    ) -> TextDelta:
        """Return the last delta of an output that a control token ended, with what was held back before it."""
        last, matched = self._last()
        if matched is None:
            last, matched = last + (control_text if self._includes_stop else ""), control_text
        return TextDelta("".join(pieces) + last, token_ids, FinishReason.STOP, offsets, matched)

    def _shown(self, token_ids: Sequence[int], end: GenerationFinished | None) -> Sequence[int]:
        """Leave out the token that ended the output: it is a mark for the engine, not text, unless it is wanted."""
        is_marked = end is not None and end.stop_token_id is not None and not self._includes_stop
        if is_marked and end is not None and token_ids and token_ids[-1] == end.stop_token_id:
            return token_ids[:-1]
        return token_ids

    def _match(self, text: str, *, may_match: bool) -> tuple[str, str | None]:
        if self._matcher is None:
            return text, None
        if not may_match:
            # This text is shown and no part of a stop string.
            return self._matcher.pass_by(text), None
        space = ""
        if self._skips_space:
            rest = text.lstrip()
            self._skips_space = not rest
            space, text = text[: len(text) - len(rest)], rest
        result = self._matcher.add(text)
        return space + result.text_to_emit, result.matched

    def _last(self) -> tuple[str, str | None]:
        """Return what was held back: the beginning of a character that never came, or of a stop string."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest, None
        text = ""
        if rest:
            may_match = self._num_tokens >= self._min_output_tokens
            text, matched = self._match(rest, may_match=may_match)
            if matched is not None:
                return text, matched
        return text + self._matcher.flush(), None


class NoOutput:
    """One choice of a request whose prompt alone is of interest: an engine computes a token all the same."""

    num_tokens = 0
    num_reasoning_tokens = None

    def take(self, token_ids: Sequence[int], end: GenerationFinished | None, *, may_stop: bool = True) -> TextDelta:
        """Take the token and show nothing of it."""
        return TextDelta("", (), FinishReason.LENGTH)


def new_output(
    tokenizer: Tokenizer,
    options: GenerationOptions,
    *,
    is_continued: bool,
    kept_token_ids: frozenset[int] = frozenset(),
) -> OutputText | NoOutput:
    """Return what takes a choice's tokens; ``is_continued`` where they go on with the prompt's text."""
    if options.max_output_tokens == 0:
        return NoOutput()
    return OutputText(tokenizer, options, is_continued=is_continued, kept_token_ids=kept_token_ids)
