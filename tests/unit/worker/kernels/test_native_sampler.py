"""The native sampler against the reference in numpy: the same tokens and log-probabilities, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libs.logprobs import TokenLogprobs
from services.worker.kernels.cpu.extension import load_extension
from services.worker.kernels.cpu.sampler import NativeRowSampler
from services.worker.logits_processors import TokenHistory
from services.worker.row_sampler import ReferenceRowSampler, RowSampler, RowStatus
from services.worker.sampler import Sampler
from services.worker.step import SamplingParams
from tests.unit.worker.kernels.native_models import needs_kernels

EXTENSION = load_extension()
ROW_KERNELS = EXTENSION.supported_row_kernels() if EXTENSION else ["portable"]
# Chunks of 64, vectors of 16 and blocks of 256 tokens end before, at and after their bounds.
VOCAB_SIZES = (1, 5, 16, 63, 64, 65, 257, 1_000, 5_000, 20_011)

pytestmark = needs_kernels


def native(vocab_size: int, kernels: str = "") -> NativeRowSampler:
    assert EXTENSION is not None
    return NativeRowSampler(EXTENSION, vocab_size=vocab_size, num_threads=2, kernels=kernels)


def random_logits(random: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    scale = random.choice([0.0, 0.1, 1.0, 4.0, 30.0, 1e30])
    logits: np.ndarray = (random.normal(size=(num_rows, vocab_size)) * scale).astype(np.float32)
    if random.random() < 0.3:
        # Many equals.
        logits = np.round(logits * 2) / 2
    for row in np.flatnonzero(random.random(num_rows) < 0.05):
        logits[row, random.integers(vocab_size)] = random.choice([np.nan, np.inf, -np.inf])
    return logits


def random_params(random: np.random.Generator, vocab_size: int) -> SamplingParams:
    def ids(most: int) -> list[int]:
        chosen: list[int] = random.choice(vocab_size, min(vocab_size, most), replace=False).tolist()
        return chosen

    choices: dict[str, tuple[float, Any]] = {
        "temperature": (0.9, lambda: float(random.choice([1e-5, 0.2, 0.8, 1.0, 3.0, 1e6, 1e300]))),
        "top_k": (0.4, lambda: int(random.integers(1, vocab_size + 3))),
        "top_p": (0.5, lambda: float(random.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]))),
        "min_p": (0.3, lambda: float(random.choice([0.0, 1e-4, 0.05, 0.5, 1.0]))),
        "num_logprobs": (0.5, lambda: int(random.integers(0, 21))),
        "logit_bias": (0.3, lambda: tuple((i, float(random.choice([-100, 100, 1.5, 3e38]))) for i in ids(3))),
        "repetition_penalty": (0.3, lambda: float(random.choice([1.1, 0.5, 1e-30, 2.0]))),
        "presence_penalty": (0.3, lambda: float(random.normal())),
        "frequency_penalty": (0.3, lambda: float(random.normal())),
        "allowed_token_ids": (0.2, lambda: tuple(ids(int(random.integers(1, 40))))),
        "bad_words": (0.2, lambda: tuple((i,) for i in ids(2))),
        "min_output_tokens": (0.2, lambda: 5),
    }
    values = {name: make() for name, (share, make) in choices.items() if random.random() < share}
    return SamplingParams(seed=int(random.integers(2**63)), **values)


def assert_equal(actual: TokenLogprobs, expected: TokenLogprobs) -> None:
    for field in TokenLogprobs.__dataclass_fields__:
        assert np.array_equal(getattr(actual, field), getattr(expected, field)), field


@pytest.mark.parametrize("kernels", ROW_KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_any_settings_are_those_of_the_reference(kernels: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    statuses: set[int] = set()
    for vocab_size in VOCAB_SIZES * 6:
        num_rows = int(random.integers(1, 14))
        logits = random_logits(random, num_rows, vocab_size)
        row_samplers: tuple[RowSampler, ...] = (native(vocab_size, kernels), ReferenceRowSampler())
        samplers = [
            Sampler(max_num_seqs=num_rows, vocab_size=vocab_size, eos_token_ids=[0], row_sampler=each)
            for each in row_samplers
        ]
        histories: dict[int, TokenHistory] = {}
        for row in range(num_rows):
            params = random_params(random, vocab_size)
            for sampler in samplers:
                sampler.add(row, params, row % 3)
            if samplers[0].needs_history(row):
                tokens = random.integers(0, vocab_size, int(random.integers(1, 60))).astype(np.int32)
                histories[row] = TokenHistory(tokens, int(random.integers(0, len(tokens) + 1)))
        positions, before = random.integers(0, 1_000, num_rows), logits.copy()

        actual, expected = (each.sample(logits, np.arange(num_rows), positions, histories) for each in samplers)

        assert np.array_equal(logits, before, equal_nan=True)
        assert actual.statuses.tolist() == expected.statuses.tolist()
        assert actual.token_ids[actual.is_sampled].tolist() == expected.token_ids[expected.is_sampled].tolist()
        assert_equal(actual.logprobs, expected.logprobs)
        statuses |= set(actual.statuses.tolist())
    assert statuses == set(RowStatus)


@pytest.mark.parametrize("kernels", ROW_KERNELS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_rows_of_a_large_vocabulary_are_those_of_the_reference(kernels: str, scale: float) -> None:
    random = np.random.default_rng(7)
    logits = (random.normal(size=(12, 49_152)) * scale).astype(np.float32)
    settings: list[dict[str, Any]] = [
        {},
        {"top_p": 0.95},
        {"top_p": 0.5},
        {"top_p": 0.9999},
        {"top_k": 50},
        {"top_k": 5_000, "top_p": 0.9},
        {"min_p": 0.01},
        {"top_p": 0.9, "min_p": 1e-3},
    ]
    samplers = [
        Sampler(max_num_seqs=12, vocab_size=49_152, eos_token_ids=[], row_sampler=each)
        for each in (native(49_152, kernels), ReferenceRowSampler())
    ]
    for row in range(12):
        params = SamplingParams(temperature=0.8, seed=row, num_logprobs=5, **settings[row % len(settings)])
        for sampler in samplers:
            sampler.add(row, params, 0)

    for position in range(3):
        actual, expected = (each.sample(logits, np.arange(12), np.full(12, position), {}) for each in samplers)

        assert actual.token_ids.tolist() == expected.token_ids.tolist()
        assert_equal(actual.logprobs, expected.logprobs)


@pytest.mark.parametrize("kernels", ROW_KERNELS)
def test_prompt_rows_are_measured_as_by_the_reference(kernels: str) -> None:
    random = np.random.default_rng(3)
    for vocab_size in VOCAB_SIZES:
        logits = (random.normal(size=(9, vocab_size)) * 5).astype(np.float32)
        token_ids, counts = random.integers(0, vocab_size, 9), random.integers(0, 21, 9)

        actual = native(vocab_size, kernels).measure(logits, token_ids, counts)

        expected = ReferenceRowSampler().measure(logits, token_ids, counts)
        assert actual is not None
        assert expected is not None
        assert_equal(actual, expected)
        logits[4, 0] = np.nan
        assert native(vocab_size, kernels).measure(logits, token_ids, counts) is None


def test_arrays_that_do_not_fit_are_refused() -> None:
    sampler = Sampler(max_num_seqs=2, vocab_size=8, eos_token_ids=[], row_sampler=native(8))
    logits = np.zeros((1, 9), dtype=np.float32)

    with pytest.raises(ValueError, match="as wide as the vocabulary"):
        sampler.sample(logits, np.array([0]), np.array([0]), {})
    with pytest.raises(ValueError, match="not in the vocabulary"):
        native(8).measure(logits[:, :8].copy(), np.array([8]), np.array([0]))
    with pytest.raises(ValueError, match="no row kernels named sse"):
        native(8, "sse")
