"""Rotary position embedding in the half-rotated convention.

Owns frequencies, their scaling and the rotation. It must not know which heads are queries and which are keys.
Su et al., RoFormer, 2021, section 3.4.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.worker.weights import (
    FrequencyFactors,
    LinearRopeScaling,
    Llama3RopeScaling,
    Rotary,
    YarnRopeScaling,
)


def rotary_frequencies(rotary: Rotary, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of a head, ``[head_dim / 2]`` fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rotary.theta**exponents)
    match rotary.scaling:
        case None:
            return frequencies
        case FrequencyFactors(factors):
            return frequencies / torch.tensor(factors, dtype=torch.float32)
        case LinearRopeScaling(factor):
            return frequencies / factor
        case Llama3RopeScaling() as scaling:
            return _llama3_scaled(frequencies, scaling)
        case YarnRopeScaling() as scaling:
            return _yarn_scaled(frequencies, rotary.theta, scaling)


def rotary_amplitude(rotary: Rotary) -> float:
    """Return what cosines and sines are multiplied by."""
    return rotary.scaling.amplitude if isinstance(rotary.scaling, YarnRopeScaling) else 1.0


def rotation_of(positions: Tensor, frequencies: Tensor, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine of ``positions`` ``[num_tokens]``, each ``[num_tokens, 1, head_dim]`` fp32."""
    angles = positions.float()[:, None] * frequencies
    cosine, sine = angles.cos() * amplitude, angles.sin() * amplitude
    return torch.cat((cosine, cosine), -1)[:, None], torch.cat((-sine, sine), -1)[:, None]


def rotate(heads: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
    """Rotate ``heads`` ``[num_tokens, num_heads, head_dim]``; computed in fp32, returned in their own dtype.

    Rolling by half a head and a sine that is negative in the first half are the rotation
    ``(a cos - b sin, b cos + a sin)`` of the pairs ``(a, b)`` in three operators.
    """
    precise = heads.float()
    half = heads.shape[-1] // 2
    return torch.addcmul(precise * cosine, torch.roll(precise, half, -1), signed_sine).to(heads.dtype)


def _llama3_scaled(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Stretch long waves, keep short ones and blend between."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_position / scaling.low_freq_factor
    blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > shortest_stretched, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < longest_kept, frequencies, scaled)


def _yarn_scaled(frequencies: Tensor, theta: float, scaling: YarnRopeScaling) -> Tensor:
    """Keep the pairs that turn often within the original context, stretch those that turn seldom, blend between."""
    num_pairs = len(frequencies)

    def pair_that_turns(num_turns: float) -> float:
        return num_pairs * math.log(scaling.original_max_position / (num_turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.has_whole_borders:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    if first == last:
        last += 0.001  # A border, not a blend.
    stretched_share = ((torch.arange(num_pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / scaling.factor * stretched_share + frequencies * (1 - stretched_share)
