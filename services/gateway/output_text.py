"""From output tokens to the text that a client may see.

Owns whole characters, stop strings and the count of tokens that a client pays for. It must not know HTTP or
engines. However tokens are cut into steps, the same text comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from libs.text import IncrementalDetokenizer, Tokenizer
from services.gateway.generation import FinishReason, GenerationFinished
from services.gateway.stop_strings import StopStringMatcher


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became certain, and why the output is over if it is."""

    text: str
    finish_reason: FinishReason | None


class OutputText:
    """One choice's text."""

    def __init__(self, tokenizer: Tokenizer, *, stop_strings: Sequence[str], min_output_tokens: int) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopStringMatcher(stop_strings, include_stop_str=False) if stop_strings else None
        self._min_output_tokens = min_output_tokens
        # Tokens taken until the end, the one that completed a stop string included: what the client pays for.
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int], end: GenerationFinished | None) -> TextDelta:
        """Take the next tokens; what comes after a stop string is surplus and not counted."""
        shown = self._shown(token_ids, end)
        if self._matcher is None:
            text = self._detokenizer.add(shown)
            self.num_tokens += len(token_ids)
        else:
            pieces: list[str] = []
            for token_id in shown:
                self.num_tokens += 1
                piece, is_stopped = self._match(self._detokenizer.add([token_id]))
                pieces.append(piece)
                if is_stopped:
                    return TextDelta("".join(pieces), FinishReason.STOP)
            self.num_tokens += len(token_ids) - len(shown)
            text = "".join(pieces)
        if end is None:
            return TextDelta(text, None)
        return self._last(text, end.reason)

    def _shown(self, token_ids: Sequence[int], end: GenerationFinished | None) -> Sequence[int]:
        """Leave out the token that ended the output: it is a mark for the engine, not text."""
        is_marked = end is not None and end.stop_token_id is not None
        if is_marked and end is not None and token_ids and token_ids[-1] == end.stop_token_id:
            return token_ids[:-1]
        return token_ids

    def _match(self, text: str) -> tuple[str, bool]:
        assert self._matcher is not None
        if self.num_tokens < self._min_output_tokens:
            # Too early to stop: this text is shown and no part of a stop string.
            return text, False
        result = self._matcher.add(text)
        return result.text_to_emit, result.matched is not None

    def _last(self, text: str, reason: FinishReason) -> TextDelta:
        """Show what was held back: the beginning of a character that never came, or of a stop string."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return TextDelta(text + rest, reason)
        if rest:
            piece, is_stopped = self._match(rest)
            if is_stopped:
                return TextDelta(text + piece, FinishReason.STOP)
            text += piece
        return TextDelta(text + self._matcher.flush(), reason)
