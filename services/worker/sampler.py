"""The sampler: from logits to one token for each sequence.

Owns each slot's parameters and what they mean for its next row. It must not know how logits came about, how rows
are computed or what becomes of the tokens. What a row gets is a function of its own logits, parameters and history,
never of its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from services.worker.gumbel import split_seed
from services.worker.logits_processors import LogitsEdits, LogitsRules, TokenHistory, make_rules
from services.worker.row_sampler import (
    NO_LOGPROBS,
    Logits,
    ReferenceRowSampler,
    RowSampler,
    RowSettings,
    SampledRows,
)
from services.worker.step import IntArray, SamplingParams
from services.worker.token_mask import TokenMatcher, num_mask_words

# At this temperature already the most likely token always wins; a lower one would overflow.
_LEAST_TEMPERATURE = 1e-6
# At this one all tokens are equally likely; the inverse of a higher one would vanish.
_GREATEST_TEMPERATURE = 1e30


class Sampler:
    """Parameters of all slots and the choice of tokens."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        row_sampler: RowSampler | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._row_sampler = row_sampler or ReferenceRowSampler()
        self._rules: list[LogitsRules | None] = [None] * max_num_seqs
        self._matchers: list[TokenMatcher | None] = [None] * max_num_seqs
        # What does not filter is written as the value that keeps everything.
        self._inverse_temperatures = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs)
        self._least_scores = np.zeros(max_num_seqs, dtype=np.float32)
        self._num_alternatives = np.zeros(max_num_seqs, dtype=np.int64)
        # [max_num_seqs, 4]: low and high word of the seed, choice index, and room for the position
        self._draw_keys = np.zeros((max_num_seqs, 4), dtype=np.uint32)

    def add(
        self, slot: int, params: SamplingParams, choice_index: int, matcher: TokenMatcher | None = None
    ) -> None:
        """Take the parameters of a new sequence; ``matcher`` has accepted the output that it has already.

        Raises:
            InvalidRequest: when they name a token outside the vocabulary.
        """
        rules = make_rules(params, self._eos_token_ids, self._vocab_size)
        self._rules[slot] = None if rules.are_neutral and matcher is None else rules
        self._matchers[slot] = matcher
        self._inverse_temperatures[slot] = (
            0.0
            if params.is_greedy
            else 1.0 / min(max(params.temperature, _LEAST_TEMPERATURE), _GREATEST_TEMPERATURE)
        )
        self._top_k[slot] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[slot] = 1.0 if params.top_p is None else params.top_p
        self._least_scores[slot] = math.log(params.min_p) if params.min_p else -math.inf
        self._num_alternatives[slot] = NO_LOGPROBS if params.num_logprobs is None else params.num_logprobs
        self._draw_keys[slot, :3] = (*split_seed(params.seed), choice_index)

    def needs_history(self, slot: int) -> bool:
        """Whether the sequence's logits are changed, for which its tokens are needed."""
        return self._rules[slot] is not None

    def unprepared(self, slots: IntArray) -> dict[int, TokenMatcher]:
        """Return the matchers, by slot, that must be prepared before these sequences can be sampled."""
        matchers = ((slot, self._matchers[slot]) for slot in slots.tolist())
        return {slot: matcher for slot, matcher in matchers if matcher is not None and not matcher.is_prepared}

    def matcher_failure(self, slot: int) -> str | None:
        """Why the sequence's matcher allows nothing, as a sentence; None where it does."""
        matcher = self._matchers[slot]
        return None if matcher is None else matcher.failure

    def wants_logprobs(self, slots: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which of the sequences want the log-probabilities of their output."""
        wants: np.ndarray[tuple[int], np.dtype[np.bool_]] = self._num_alternatives[slots] != NO_LOGPROBS
        return wants

    def sample(
        self, logits: Logits, slots: IntArray, positions: IntArray, histories: Mapping[int, TokenHistory]
    ) -> SampledRows:
        """Choose a token for each row of ``logits``, which stay as they are.

        Args:
            logits: as the model gave them.
            slots: whose row it is.
            positions: number of output tokens that each sequence has already.
            histories: by row, for the rows whose slot needs one.
        """
        draw_keys = self._draw_keys[slots]
        draw_keys[:, 3] = positions
        sampled = self._row_sampler.sample(
            logits,
            RowSettings(
                inverse_temperatures=self._inverse_temperatures[slots],
                top_k=self._top_k[slots],
                top_p=self._top_p[slots],
                least_scores=self._least_scores[slots],
                draw_keys=draw_keys,
                num_alternatives=self._num_alternatives[slots],
                edits={row: self._edits(int(slots[row]), history) for row, history in histories.items()},
            ),
        )
        for row in histories:
            matcher = self._matchers[slots[row]]
            if matcher is not None and sampled.is_sampled[row]:
                matcher.accept(int(sampled.token_ids[row]))
        return sampled

    def _edits(self, slot: int, history: TokenHistory) -> LogitsEdits:
        rules, matcher = self._rules[slot], self._matchers[slot]
        assert rules is not None, f"slot {slot} has a history, but nothing to do with it"
        if matcher is None:
            return rules.edits_after(history)
        mask = np.zeros(num_mask_words(self._vocab_size), dtype=np.int32)
        matcher.fill_mask(mask)
        return rules.edits_after(history, (mask,))
