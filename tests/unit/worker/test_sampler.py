from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.worker.logits_processors import TokenHistory
from services.worker.sampler import Sampler
from services.worker.step import SamplingParams

VOCAB_SIZE = 50


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    *,
    positions: list[int] | None = None,
    choices: list[int] | None = None,
) -> list[int | None]:
    """Sample one token for each row, with row i in slot i; None where the row is not valid."""
    sampler = Sampler(max_num_seqs=len(params), vocab_size=logits.shape[1], eos_token_ids=[1])
    for slot, each in enumerate(params):
        sampler.add(slot, each, choices[slot] if choices else 0)
    histories = {
        row: TokenHistory(np.array([2], dtype=np.int32), 1)
        for row in range(len(params))
        if sampler.needs_history(row)
    }
    rows = sampler.sample(
        logits.numpy(),
        np.arange(len(params)),
        np.array(positions or [0] * len(params), dtype=np.int64),
        histories,
    )
    return [
        int(token_id) if is_valid else None
        for token_id, is_valid in zip(rows.token_ids, rows.is_sampled, strict=True)
    ]


def frequencies(logits: torch.Tensor, params: dict[str, object], num_draws: int) -> np.ndarray:
    """Count the tokens of draws that differ in their seed."""
    all_params = [SamplingParams(temperature=1.0, seed=seed, **params) for seed in range(num_draws)]  # type: ignore[arg-type]
    drawn = sample(logits.expand(num_draws, -1), all_params)
    return np.bincount([token_id for token_id in drawn if token_id is not None], minlength=logits.shape[-1])


def assert_fits(counts: np.ndarray, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square test at a level of 5e-5, by the cube root approximation of Wilson and Hilferty."""
    expected = probabilities.double().numpy() * counts.sum()
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviation < 3.9


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [30, 8, 41]] = 2.0

    assert sample(logits, [SamplingParams()]) == [8]


def test_draws_follow_the_softmax() -> None:
    logits = torch.linspace(-3, 2, 10)[torch.randperm(10, generator=torch.Generator().manual_seed(1))]

    counts = frequencies(logits, {}, 6_000)

    assert_fits(counts, torch.softmax(logits.double(), -1))


def test_draws_over_positions_follow_the_softmax() -> None:
    logits = torch.linspace(-2, 2, 8)
    params = [SamplingParams(temperature=1.0, seed=99)] * 6_000

    drawn = sample(logits.expand(6_000, -1), params, positions=list(range(6_000)))

    counts = np.bincount(np.array(drawn, dtype=np.int64), minlength=8)
    assert_fits(counts, torch.softmax(logits.double(), -1))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.6}, [0, 1]),  # 0.4 + 0.3 reach it
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"min_p": 0.4}, [0, 1, 2]),  # at least 0.16
        ({"top_k": 3, "top_p": 0.76}, [0, 1]),  # 0.7 of the 0.9 that top_k left
        ({"min_p": 0.2, "top_p": 0.9}, [0, 1, 2]),
        ({"top_k": 50, "top_p": 1.0}, [0, 1, 2, 3, 4]),
    ],
)
def test_filters_keep_and_renormalise(params: dict[str, object], kept: list[int]) -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03])

    counts = frequencies(probabilities.log(), params, 4_000)

    assert np.flatnonzero(counts).tolist() == kept
    assert_fits(counts[kept], probabilities[kept] / probabilities[kept].sum())


def test_filters_keep_all_that_tie_at_the_border() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 0.0])

    assert np.flatnonzero(frequencies(logits, {"top_k": 2}, 500)).tolist() == [0, 1, 2, 3]


def naive_kept(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Return what the filters keep, by sorting everything."""
    scores = (logits / params.temperature).double()
    order = torch.argsort(scores, descending=True).tolist()
    probabilities = torch.softmax(scores, -1)
    if params.min_p is not None:
        order = [i for i in order if probabilities[i] >= params.min_p * probabilities.max()]
    if params.top_k is not None:
        order = order[: params.top_k]
    if params.top_p is not None:
        total, mass, kept = float(probabilities[order].sum()), 0.0, []
        for index in order:
            kept.append(index)
            mass += float(probabilities[index])
            if mass >= params.top_p * total:
                break
        order = kept
    return set(order)


def test_every_draw_is_among_what_a_naive_filter_keeps() -> None:
    random = np.random.default_rng(5)
    logits = torch.from_numpy(random.normal(0, 4, (300, 900))).float()
    params = [
        SamplingParams(
            temperature=float(random.choice([0.3, 1.0, 4.0])),
            top_k=int(random.integers(1, 900)) if random.random() < 0.5 else None,
            top_p=float(random.uniform(0.05, 1.0)) if random.random() < 0.6 else None,
            min_p=float(random.uniform(0, 0.3)) if random.random() < 0.3 else None,
            seed=int(random.integers(2**63)),
        )
        for _ in range(300)
    ]

    drawn = sample(logits, params)

    for row, token_id in enumerate(drawn):
        assert token_id in naive_kept(logits[row], params[row])


def test_wide_filters_draw_as_narrow_ones_do() -> None:
    logits = torch.randn(6, 40_000, generator=torch.Generator().manual_seed(3)) * 0.1
    params = [SamplingParams(temperature=1.0, top_k=30_000, seed=seed) for seed in range(6)]

    # Alone, each row is one of few candidates; together with a narrow one the average decides.
    wide = sample(logits, params)
    narrow = [SamplingParams(temperature=1.0, top_k=2, seed=9)] * 200
    mixed = sample(torch.cat((logits, logits[:1].expand(200, -1))), [*params, *narrow])

    assert wide == mixed[:6]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    random = np.random.default_rng(6)
    logits = torch.from_numpy(random.normal(0, 3, (24, 2_000))).float()
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 20, "logit_bias": ((3, 5.0),)},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.3},
    ]
    params = [SamplingParams(seed=row, **kinds[row % len(kinds)]) for row in range(24)]  # type: ignore[arg-type]

    together = sample(logits, params)

    assert together == [sample(logits[row : row + 1], [params[row]])[0] for row in range(24)]


def test_choices_and_positions_draw_differently() -> None:
    logits = torch.zeros(4, 5_000)
    params = [SamplingParams(temperature=1.0, seed=7)] * 4

    drawn = sample(logits, params, positions=[0, 1, 0, 0], choices=[0, 0, 1, 0])

    assert len(set(drawn[:3])) == 3
    assert drawn[3] == drawn[0]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(40, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 30

    drawn = sample(logits, [SamplingParams(temperature=temperature, seed=seed) for seed in range(40)])

    assert drawn == logits.argmax(-1).tolist()


def test_huge_temperature_is_flat() -> None:
    counts = frequencies(torch.linspace(-50, 50, 10) / 1e30, {}, 3_000)

    assert_fits(counts, torch.full((10,), 0.1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_number_fails_alone(value: float) -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(4))
    expected = sample(logits, [SamplingParams(temperature=1.0, seed=1)] * 3)
    logits[1, 17] = value

    drawn = sample(logits, [SamplingParams(temperature=1.0, seed=1)] * 3)

    assert drawn == [expected[0], None, expected[2]]


def test_a_row_without_any_token_left_fails_alone() -> None:
    params = [SamplingParams(allowed_token_ids=(1,), min_output_tokens=1), SamplingParams()]

    drawn = sample(torch.zeros(2, VOCAB_SIZE), params)

    assert drawn == [None, 0]


def test_a_slot_forgets_the_parameters_of_its_last_sequence() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    sampler = Sampler(max_num_seqs=1, vocab_size=VOCAB_SIZE, eos_token_ids=[])
    sampler.add(0, SamplingParams(temperature=1.0, top_k=5, logit_bias=((9, 50.0),)), 3)

    sampler.add(0, SamplingParams(), 0)

    assert not sampler.needs_history(0)
    assert sampler.sample(logits.numpy(), np.array([0]), np.array([0]), {}).token_ids.tolist() == [0]
