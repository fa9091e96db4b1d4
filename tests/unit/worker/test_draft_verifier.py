"""Tokens with drafts are the tokens without, one by one: choices, log-probabilities, failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from libs.logprobs import TokenLogprobs
from services.worker.draft_verifier import SampledSequences, sample_sequences
from services.worker.input_batch import BatchLimits, FlatBatch, InputBatch
from services.worker.row_sampler import RowStatus
from services.worker.sampler import Sampler
from services.worker.step import SamplingParams
from services.worker.token_mask import TokenMask, mask_of
from tests.unit.worker.small_engine import ints, new_sequence, step

VOCAB_SIZE = 12
END_TOKEN_ID = 0
PROMPT = [3, 4, 5]
NUM_TOKENS = 24

PARAMS = {
    "greedy": SamplingParams(),
    "drawn": SamplingParams(temperature=1.0, seed=5),
    "filtered": SamplingParams(temperature=0.7, top_p=0.8, top_k=5, min_p=0.01, seed=6),
    "penalties": SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "drawn with penalties": SamplingParams(temperature=0.9, seed=7, frequency_penalty=0.8),
    "least length": SamplingParams(min_output_tokens=10, stop_token_ids=(7, 8)),
    "bad words": SamplingParams(bad_words=((1,), (2, 3), (9, 9))),
    "allowed": SamplingParams(temperature=1.0, seed=8, allowed_token_ids=(1, 2, 3, 4)),
    "log-probabilities": SamplingParams(temperature=1.0, seed=9, num_logprobs=3),
}


def logits_after(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return what a toy model says after these tokens: a function of the last three."""
    generator = np.random.default_rng([int(token_id) for token_id in token_ids[-3:]])
    return generator.normal(0.0, 2.0, VOCAB_SIZE).astype(np.float32)


@dataclass
class Alternating:
    """A matcher whose mask depends on how many tokens it has accepted; it refuses to go back."""

    accepted: list[int] = field(default_factory=list)

    is_prepared = True
    failure = None

    def prepare(self, timeout_seconds: float) -> bool:
        return True

    def fill_mask(self, mask: TokenMask) -> None:
        parity = len(self.accepted) % 2
        mask[:] = mask_of(range(1 + parity, VOCAB_SIZE, 2), VOCAB_SIZE)

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 1 - len(self.accepted) % 2
        self.accepted.append(token_id)


class Toy:
    """One worker's input batch and sampler over the toy model."""

    def __init__(
        self, params: Sequence[SamplingParams], matchers: Sequence[Alternating | None] | None = None
    ) -> None:
        self.batch = InputBatch(
            BatchLimits(
                max_num_seqs=8,
                max_model_len=64,
                max_num_batched_tokens=256,
                num_blocks=64,
                block_size=8,
                vocab_size=VOCAB_SIZE,
            )
        )
        self.sampler = Sampler(max_num_seqs=8, vocab_size=VOCAB_SIZE, eos_token_ids=[END_TOKEN_ID])
        self.params = list(params)
        self.matchers = matchers or [None] * len(params)
        self.outputs: list[list[int]] = [[] for _ in params]
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in params]
        self.num_steps = 0

    def run(self, draft: Callable[[int, list[int]], Sequence[int]]) -> None:
        """Step until each sequence has ``NUM_TOKENS``."""
        while min(map(len, self.outputs)) < NUM_TOKENS:
            sampled = self.step({slot: draft(slot, output) for slot, output in enumerate(self.outputs)})
            assert (sampled.num_tokens > 0).all()

    def step(self, drafts: dict[int, Sequence[int]]) -> SampledSequences:
        batch = self._prepare(drafts)
        logits = np.stack(
            [
                logits_after(self.batch.token_ids_of(slot, place).tolist())
                for slot in range(len(self.params))
                for place in range(len(drafts[slot]) + 1)
            ]
        )
        sampled = sample_sequences(self.sampler, self.batch, logits, batch.slots, batch.num_drafts)
        has_tokens = sampled.num_tokens > 0
        self.batch.commit(batch, batch.slots[has_tokens], sampled.num_tokens[has_tokens], sampled.token_ids)
        self._note(sampled)
        return sampled

    def _prepare(self, drafts: dict[int, Sequence[int]]) -> FlatBatch:
        slots, is_first = range(len(self.params)), self.num_steps == 0
        self.num_steps += 1
        num_known = len(PROMPT) if is_first else 1
        prepared = self.batch.prepare(
            step(
                new=[new_sequence(slot, PROMPT, block_ids=range(8 * slot, 8 * slot + 8)) for slot in slots]
                if is_first
                else (),
                scheduled=[(slot, num_known + len(drafts[slot]), ()) for slot in slots],
                drafts=drafts,
            ),
            lambda new: self.sampler.add(new.slot, self.params[new.slot], 0, self.matchers[new.slot]),
        )
        assert prepared.batch is not None
        assert prepared.batch.is_sampled.all()
        return prepared.batch

    def _note(self, sampled: SampledSequences) -> None:
        parts = np.split(sampled.token_ids, np.cumsum(sampled.num_tokens)[:-1])
        first = 0
        for slot, part in enumerate(parts):
            self.outputs[slot] += part.tolist()
            if self.params[slot].num_logprobs is not None:
                for entry in range(first, first + len(part)):
                    self.logprobs[slot].append(sampled.logprobs.in_order(ints(entry)))
                first += len(part)
        assert first == len(sampled.logprobs)


def without_drafts(params: Sequence[SamplingParams]) -> Toy:
    toy = Toy(params)
    toy.run(lambda slot, output: ())
    return toy


@pytest.mark.parametrize("num_right", [0, 1, 3, 5])
def test_the_same_tokens_come_with_drafts_as_without(num_right: int) -> None:
    params = list(PARAMS.values())[:8]
    one_by_one = without_drafts(params)

    def draft(slot: int, output: list[int]) -> list[int]:
        """Propose some tokens that are right, then wrong ones; each sequence another number."""
        right = one_by_one.outputs[slot][len(output) : len(output) + num_right]
        following = one_by_one.outputs[slot][len(output) + len(right) : len(output) + len(right) + 1]
        return [*right, *(1 + token_id % (VOCAB_SIZE - 1) for token_id in following)][: 1 + slot]

    several = Toy(params)
    several.run(draft)

    assert [output[:NUM_TOKENS] for output in several.outputs] == [
        output[:NUM_TOKENS] for output in one_by_one.outputs
    ]
    assert (several.num_steps < one_by_one.num_steps) == (num_right > 0)


def test_each_token_has_the_log_probabilities_that_it_has_alone() -> None:
    params = [PARAMS["log-probabilities"], PARAMS["greedy"], SamplingParams(num_logprobs=0)]
    one_by_one = without_drafts(params)

    several = Toy(params)
    several.run(lambda slot, output: one_by_one.outputs[slot][len(output) : len(output) + 1 + slot])

    for slot in (0, 2):
        pairs = list(zip(several.logprobs[slot], one_by_one.logprobs[slot], strict=False))
        assert len(pairs) >= NUM_TOKENS
        for came, expected in pairs:
            for name in ("logprobs", "ranks", "alternative_token_ids", "alternative_logprobs"):
                assert getattr(came, name).tolist() == getattr(expected, name).tolist()
    assert several.num_steps < one_by_one.num_steps


def test_a_matcher_takes_only_what_was_sampled() -> None:
    matchers = [Alternating()]
    one_by_one = Toy([SamplingParams()], [Alternating()])
    one_by_one.run(lambda slot, output: ())

    # The second draft is never allowed where it stands.
    toy = Toy([SamplingParams()], matchers)
    toy.run(lambda slot, output: [one_by_one.outputs[0][len(output)], 2 - len(output) % 2] if output else ())

    assert toy.outputs[0][:NUM_TOKENS] == one_by_one.outputs[0][:NUM_TOKENS]
    assert matchers[0].accepted == toy.outputs[0]
    assert toy.num_steps < one_by_one.num_steps


def test_a_row_behind_accepted_drafts_that_cannot_be_sampled_is_left_to_the_next_step() -> None:
    # Once 1, 2 and 3 were said nothing may follow.
    nothing_after = SamplingParams(allowed_token_ids=(1, 2, 3), bad_words=((1,), (2,), (3,)))
    toy = Toy([SamplingParams(), nothing_after])
    first = toy.step({0: (), 1: ()})

    assert first.statuses.tolist() == [RowStatus.SAMPLED, RowStatus.NO_TOKEN_LEFT]
    assert first.num_tokens.tolist() == [1, 0]

    later = Toy([SamplingParams(allowed_token_ids=(1, 2), bad_words=((1, 1), (1, 2), (2, 1), (2, 2)))])
    chosen = int(later.step({0: ()}).token_ids[0])
    assert chosen in (1, 2)
    again = Toy([later.params[0]])
    with_draft = again.step({0: (chosen,)})

    assert with_draft.token_ids.tolist() == [chosen]
    assert again.step({0: ()}).statuses.tolist() == [RowStatus.NO_TOKEN_LEFT]


def test_drafts_leave_the_distribution_as_it_is() -> None:
    num_seeds = 1500
    counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    likeliest = int(np.argmax(logits_after(PROMPT)))
    num_accepted = 0

    for seed in range(num_seeds):
        toy = Toy([SamplingParams(temperature=1.0, seed=seed)])
        # Half are proposed what is likely, the others what is not.
        num_accepted += int(toy.step({0: (likeliest if seed % 2 else 11, 2)}).num_tokens[0]) > 1
        while len(toy.outputs[0]) < 2:
            toy.step({0: ()})
        counts[toy.outputs[0][0], toy.outputs[0][1]] += 1

    expected = num_seeds * _joint_probabilities()
    is_common = expected >= 5
    observed = np.append(counts[is_common], counts[~is_common].sum())
    wanted = np.append(expected[is_common], expected[~is_common].sum())
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    # A chi-squared variable with k degrees of freedom exceeds k + 4 sqrt(2k) once in several thousand times.
    degrees = len(observed) - 1
    assert degrees > 15
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)
    assert num_accepted > num_seeds / 10


def _joint_probabilities() -> NDArray[np.float64]:
    def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
        weights = np.exp(logits.astype(np.float64) - logits.max())
        probabilities: NDArray[np.float64] = weights / weights.sum()
        return probabilities

    first = softmax(logits_after(PROMPT))
    return np.stack(
        [first[token_id] * softmax(logits_after([*PROMPT, token_id])) for token_id in range(VOCAB_SIZE)]
    )
