from __future__ import annotations

import math

import numpy as np

from services.worker.gumbel import DrawKey, draw, draw_from_candidates, gumbel_noise, split_seed


def key_of(seed: int, *, position: int = 0, choice: int = 0) -> DrawKey:
    return DrawKey(*split_seed(seed), choice, position)


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(key_of(123), np.arange(40_000))

    # Kolmogorov-Smirnov at a level of 1e-6 for this number of draws.
    theory = np.exp(-np.exp(-np.sort(noise)))
    distance = np.abs(theory - np.arange(1, len(noise) + 1) / len(noise)).max()
    assert distance < 2.7 / math.sqrt(len(noise))


def test_noise_depends_on_each_part_of_its_key() -> None:
    token_ids = np.arange(1_000)

    def noise(seed: int, position: int, choice: int) -> np.ndarray:
        return gumbel_noise(key_of(seed, position=position, choice=choice), token_ids)

    base = noise(5, 6, 7)
    assert np.array_equal(base, noise(5, 6, 7))
    for other in (noise(4, 6, 7), noise(5 + 2**32, 6, 7), noise(5, 5, 7), noise(5, 6, 8)):
        assert (base != other).all()
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.15


def test_fast_search_finds_what_all_noise_would_give() -> None:
    random = np.random.default_rng(3)
    for scale in (0.0, 0.5, 3.0, 40.0):
        for seed in range(12):
            scores = (random.normal(size=5_003) * scale).astype(np.float32)
            scores -= scores.max()
            key = key_of(1_000 + seed, position=9)

            fast = draw(scores, np.ones(5_003, dtype=np.bool_), int(scores.argmax()), key)

            assert fast == draw_from_candidates(scores, np.arange(5_003), key)


def test_what_is_not_kept_never_wins() -> None:
    is_kept = np.zeros(64, dtype=np.bool_)
    is_kept[7] = True

    drawn = [draw(np.zeros(64, dtype=np.float32), is_kept, 7, key_of(seed)) for seed in range(200)]

    assert set(drawn) == {7}
