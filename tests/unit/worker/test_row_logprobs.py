"""Log-probabilities of sampled tokens, and masks from matchers, with either row sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.worker.kernels.cpu.extension import load_extension
from services.worker.kernels.cpu.sampler import NativeRowSampler
from services.worker.logits_processors import TokenHistory
from services.worker.row_sampler import ReferenceRowSampler, RowSampler, RowStatus, SampledRows
from services.worker.sampler import Sampler
from services.worker.step import SamplingParams
from services.worker.token_mask import TokenMask, allowed_of, mask_of

VOCAB_SIZE = 500
EXTENSION = load_extension()


@pytest.fixture(params=["reference", "native"])
def row_sampler(request: pytest.FixtureRequest) -> RowSampler:
    if request.param == "reference":
        return ReferenceRowSampler()
    if EXTENSION is None:
        pytest.skip("needs the compiled kernels: python -m services.worker.kernels.cpu.build")
    return NativeRowSampler(EXTENSION, vocab_size=VOCAB_SIZE, num_threads=2)


def random_logits(num_rows: int, scale: float = 4.0) -> np.ndarray:
    return (np.random.default_rng(1).normal(size=(num_rows, VOCAB_SIZE)) * scale).astype(np.float32)


def sample(
    row_sampler: RowSampler,
    logits: np.ndarray,
    params: list[SamplingParams],
    matchers: dict[int, Matcher] | None = None,
) -> SampledRows:
    sampler = Sampler(max_num_seqs=len(params), vocab_size=VOCAB_SIZE, eos_token_ids=[1], row_sampler=row_sampler)
    for slot, each in enumerate(params):
        sampler.add(slot, each, 0, (matchers or {}).get(slot))
    histories = {
        row: TokenHistory(np.array([2, 3], dtype=np.int32), 1)
        for row in range(len(params))
        if sampler.needs_history(row)
    }
    return sampler.sample(logits, np.arange(len(params)), np.zeros(len(params), dtype=np.int64), histories)


class Matcher:
    """Allows what it was told to, and remembers what was accepted."""

    is_prepared = True
    failure = None

    def prepare(self, timeout_seconds: float) -> bool:
        return True

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.accepted: list[int] = []

    def fill_mask(self, mask: TokenMask) -> None:
        mask[:] = mask_of(self.token_ids, VOCAB_SIZE)

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def test_logprobs_are_those_of_the_log_softmax_whatever_the_parameters(row_sampler: RowSampler) -> None:
    logits = random_logits(6)
    params = [
        SamplingParams(num_logprobs=3),
        SamplingParams(temperature=2.0, seed=5, num_logprobs=3),
        SamplingParams(temperature=0.5, top_p=0.5, seed=6, num_logprobs=20),
        SamplingParams(logit_bias=((7, 100.0),), num_logprobs=0),
        SamplingParams(allowed_token_ids=(9,), num_logprobs=1),
        SamplingParams(temperature=1.0, repetition_penalty=1.5, num_logprobs=2),
    ]

    rows = sample(row_sampler, logits, params)

    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    order = np.argsort(-logits, axis=-1, kind="stable")
    first = 0
    for row, each in enumerate(params):
        token_id, count = int(rows.token_ids[row]), each.num_logprobs or 0
        assert math.isclose(rows.logprobs.logprobs[row], expected[row, token_id], abs_tol=1e-5)
        assert rows.logprobs.ranks[row] == 1 + (logits[row] > logits[row, token_id]).sum()
        assert rows.logprobs.num_alternatives[row] == count
        alternatives = rows.logprobs.alternative_token_ids[first : first + count]
        assert alternatives.tolist() == order[row, :count].tolist()
        np.testing.assert_allclose(
            rows.logprobs.alternative_logprobs[first : first + count], expected[row, alternatives], atol=1e-5
        )
        first += count
    assert rows.token_ids[3:5].tolist() == [7, 9]


def test_equals_share_a_rank_and_come_by_id(row_sampler: RowSampler) -> None:
    logits = np.zeros((1, VOCAB_SIZE), dtype=np.float32)
    logits[0, [40, 30]] = 1.0

    rows = sample(row_sampler, logits, [SamplingParams(logit_bias=((20, 2.0),), num_logprobs=4)])

    assert rows.token_ids.tolist() == [20]
    assert rows.logprobs.ranks.tolist() == [3]
    assert rows.logprobs.alternative_token_ids.tolist() == [30, 40, 0, 1]


def test_more_alternatives_than_tokens_are_all_tokens(row_sampler: RowSampler) -> None:
    rows = sample(row_sampler, random_logits(1), [SamplingParams(num_logprobs=VOCAB_SIZE + 7)])

    assert sorted(rows.logprobs.alternative_token_ids.tolist()) == list(range(VOCAB_SIZE))
    assert math.isclose(
        float(np.exp(rows.logprobs.alternative_logprobs.astype(np.float64)).sum()), 1.0, abs_tol=1e-5
    )


def test_who_wants_logprobs_changes_nobody(row_sampler: RowSampler) -> None:
    logits = random_logits(8)
    params = [SamplingParams(temperature=1.0, seed=row) for row in range(8)]
    wanting = [
        SamplingParams(temperature=1.0, seed=row, num_logprobs=5 if row % 3 == 1 else None) for row in range(8)
    ]

    plain, mixed = sample(row_sampler, logits, params), sample(row_sampler, logits, wanting)

    assert plain.token_ids.tolist() == mixed.token_ids.tolist()
    assert (len(plain.logprobs), len(mixed.logprobs)) == (0, 3)
    for index, row in enumerate((1, 4, 7)):
        alone = sample(row_sampler, logits[row : row + 1], [wanting[row]])
        assert alone.logprobs.logprobs[0] == mixed.logprobs.logprobs[index]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_number_has_no_logprobs_and_spoils_no_other(row_sampler: RowSampler, value: float) -> None:
    logits = random_logits(3)
    expected = sample(row_sampler, logits, [SamplingParams(num_logprobs=1)] * 3)
    logits[1, 400] = value

    rows = sample(row_sampler, logits, [SamplingParams(num_logprobs=1)] * 3)

    assert rows.statuses.tolist() == [RowStatus.SAMPLED, RowStatus.NOT_NUMBERS, RowStatus.SAMPLED]
    assert rows.logprobs.logprobs.tolist() == expected.logprobs.logprobs[[0, 2]].tolist()


def test_the_layout_of_a_mask_is_that_of_grammar_libraries() -> None:
    mask = mask_of([0, 31, 33, 499], VOCAB_SIZE)

    assert mask.dtype == np.int32
    assert len(mask) == 16
    assert mask[:2].tolist() == [1 - 2**31, 2]
    assert np.flatnonzero(allowed_of(mask, VOCAB_SIZE)).tolist() == [0, 31, 33, 499]


def test_a_matcher_constrains_its_row_alone_and_hears_what_was_chosen(row_sampler: RowSampler) -> None:
    logits = random_logits(3)
    matcher = Matcher([17, 300])
    params = [SamplingParams(temperature=1.0, seed=row) for row in range(3)]

    rows = sample(row_sampler, logits, params, {1: matcher})

    free = sample(row_sampler, logits, params)
    assert rows.token_ids[[0, 2]].tolist() == free.token_ids[[0, 2]].tolist()
    assert matcher.accepted == [rows.token_ids[1]]
    assert set(matcher.accepted) < {17, 300}


def test_a_matcher_and_other_masks_hold_together(row_sampler: RowSampler) -> None:
    params = [SamplingParams(allowed_token_ids=(300, 301), logit_bias=((17, 50.0),), num_logprobs=0)]

    rows = sample(row_sampler, random_logits(1), params, {0: Matcher([17, 300])})

    assert rows.token_ids.tolist() == [300]


def test_a_matcher_that_allows_nothing_leaves_no_token(row_sampler: RowSampler) -> None:
    matcher = Matcher([])

    rows = sample(row_sampler, random_logits(2), [SamplingParams(num_logprobs=1)] * 2, {1: matcher})

    assert rows.statuses.tolist() == [RowStatus.SAMPLED, RowStatus.NO_TOKEN_LEFT]
    assert matcher.accepted == []
    assert len(rows.logprobs) == 1
