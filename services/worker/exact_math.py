"""Exponentials and logarithms that come out the same to the last bit wherever they are computed.

Owns the sequence of operations. Each is one that IEEE 754 rounds in one way: sums, products and quotients, never
fused, and exact scaling by powers of two. The native sampler (kernels/cpu/src/sampling.hpp and sampler.cpp) has the
same sequence, so that it draws the same tokens. Libraries differ in the last bit of theirs.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# Sums of masses are sums of integers, so they do not depend on an order; a row of 2**22 tokens cannot overflow.
MASS_BITS = 40

_LOG2_E = np.float32(1.44269504)
_LEAST_EXPONENT = np.float32(-100.0)
_ROUNDER = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves no room for a fraction.
# 2**x around 0, from the highest power down.
_EXP2_COEFFICIENTS = tuple(
    np.float32(value)
    for value in (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
)
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = 12


def exp_of(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the exponentials of ``scores`` of at most 0, with a relative error below 5e-6; at least 2**-100."""
    with np.errstate(over="ignore"):
        exponents = np.maximum(scores * _LOG2_E, _LEAST_EXPONENT)
    whole = (exponents + _ROUNDER) - _ROUNDER
    fraction = exponents - whole
    result = np.full_like(exponents, _EXP2_COEFFICIENTS[0])
    for coefficient in _EXP2_COEFFICIENTS[1:]:
        result = result * fraction + coefficient
    scaled: NDArray[np.float32] = np.ldexp(result, whole.astype(np.int32))
    return scaled


def masses_of(weights: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return weights of at most 1 in units of 2**-40."""
    return np.ldexp(weights, MASS_BITS).astype(np.int64)


def log_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the natural logarithms of ``values`` above 0, to some 1e-15."""
    mantissas, exponents = np.frexp(values)
    is_low = mantissas < _SQRT_HALF
    mantissas = np.where(is_low, mantissas * 2.0, mantissas)
    exponents = exponents - is_low
    ratios = (mantissas - 1.0) / (mantissas + 1.0)
    squares = ratios * ratios
    series = np.full_like(ratios, 1.0 / (2 * _LOG_TERMS - 1))
    for term in range(_LOG_TERMS - 2, -1, -1):
        series = series * squares + 1.0 / (2 * term + 1)
    logarithms: NDArray[np.float64] = exponents * math.log(2.0) + (ratios + ratios) * series
    return logarithms


def log_mass_of(mass: int) -> float:
    """Return the natural logarithm of a sum of masses."""
    return float(log_of(np.ldexp(np.array([float(mass)]), -MASS_BITS))[0])
