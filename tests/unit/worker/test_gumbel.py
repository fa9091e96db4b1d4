from __future__ import annotations

import math

import numpy as np
import torch

from services.worker.gumbel import DrawKeys, draw_from_all, draw_from_candidates, gumbel_noise, split_seed


def keys_of(seeds: list[int], *, position: int = 0, choice: int = 0) -> DrawKeys:
    low, high = zip(*(split_seed(seed) for seed in seeds), strict=True)
    count = len(seeds)
    return DrawKeys(
        torch.tensor(low), torch.tensor(high), torch.full((count,), choice), torch.full((count,), position)
    )


def test_noise_has_the_gumbel_distribution() -> None:
    token_ids = torch.arange(40_000)

    noise = gumbel_noise(keys_of([123] * len(token_ids)), token_ids).numpy()

    # Kolmogorov-Smirnov at a level of 1e-6 for this number of draws.
    theory = np.exp(-np.exp(-np.sort(noise)))
    distance = np.abs(theory - np.arange(1, len(noise) + 1) / len(noise)).max()
    assert distance < 2.7 / math.sqrt(len(noise))


def test_noise_depends_on_each_part_of_its_key() -> None:
    token_ids = torch.arange(1_000)

    def noise(seed: int, position: int, choice: int) -> torch.Tensor:
        return gumbel_noise(keys_of([seed] * 1_000, position=position, choice=choice), token_ids)

    base = noise(5, 6, 7)
    assert torch.equal(base, noise(5, 6, 7))
    for other in (noise(4, 6, 7), noise(5 + 2**32, 6, 7), noise(5, 5, 7), noise(5, 6, 8)):
        assert (base != other).all()
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1]) < 0.15


def test_fast_search_finds_what_all_noise_would_give() -> None:
    generator = torch.Generator().manual_seed(3)
    for scale in (0.0, 0.5, 3.0, 40.0):
        scores = torch.randn(12, 5_003, generator=generator) * scale
        scores -= scores.amax(-1, keepdim=True)
        keys = keys_of(list(range(1_000, 1_012)), position=9)

        fast = draw_from_all(scores, scores.argmax(-1), keys)

        assert torch.equal(fast, draw_from_candidates(scores, torch.ones_like(scores, dtype=torch.bool), keys))


def test_masked_tokens_never_win() -> None:
    scores = torch.full((200, 64), -math.inf)
    scores[:, 7] = 0.0

    drawn = draw_from_all(scores, torch.full((200,), 7), keys_of(list(range(200))))

    assert (drawn == 7).all()
