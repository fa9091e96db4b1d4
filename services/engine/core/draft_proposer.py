"""Guesses what a sequence will say next: what followed the last time it said the same.

Prompt lookup decoding (Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023; in transformers and as "ngram"
in vLLM): the last tokens are looked for among those before them, and what followed there is proposed. It costs no
model and is right where text repeats itself: code that is edited, quotations, tables, summaries of what was given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.engine.core.request import TokenIds

# So far back it is looked at most, so that a proposal costs some tens of microseconds however long a sequence is.
MAX_LOOK_BACK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class DraftProposer:
    """Looks for the last ``max_ngram_tokens`` tokens, or fewer down to ``min_ngram_tokens``."""

    min_ngram_tokens: int
    max_ngram_tokens: int

    def propose(self, token_ids: TokenIds, num_drafts: int) -> TokenIds:
        """Return up to ``num_drafts`` tokens that may follow ``token_ids``; none when nothing is found.

        The longest match counts, and of equally long ones the latest. What followed is read on into the proposal
        itself, as LZ77 copies (Ziv and Lempel, 1977): else a text with a short period would give few drafts.
        """
        known = token_ids[-MAX_LOOK_BACK_TOKENS:]
        begin = self._find_follower(known) if num_drafts > 0 else None
        if begin is None:
            return known[:0]
        return known[begin + np.arange(num_drafts) % (len(known) - begin)]

    def _find_follower(self, known: TokenIds) -> int | None:
        """Return the position after the best match; the last token itself is not a match."""
        last = len(known) - 1
        if last < self.min_ngram_tokens:
            return None
        # Where a match of the last one, two, three … tokens ends.
        ends = np.flatnonzero(known[:last] == known[last])
        best = None
        for length in range(1, self.max_ngram_tokens + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[known[ends - (length - 1)] == known[last - (length - 1)]]
            if not len(ends):
                break
            if length >= self.min_ngram_tokens:
                best = int(ends[-1]) + 1
        return best
