"""Products of int8 weights against the same arithmetic in numpy: the same bits on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from services.worker.kernels.cpu.extension import Bfloat16Bits
from tests.unit.worker.kernels.native_models import EXTENSION, KERNELS, needs_kernels

pytestmark = needs_kernels

BLOCK_INPUTS = 64
FloatMatrix = NDArray[np.float32]

# Rows, inputs and columns: tiles of rows of every size, blocks and panels that are not full, one value alone.
SHAPES = [
    *((rows, 192, 96) for rows in (*range(1, 27), 35, 47, 64, 70)),
    *(
        (rows, inputs, columns)
        for rows in (1, 5, 33)
        for inputs in (1, 63, 65, 130)
        for columns in (1, 31, 33, 200)
    ),
    # More rows than a thread takes at once, and a sum of more than 2^24.
    (200, 96, 40),
    (2, 4_000, 33),
]


def bits_of(values: FloatMatrix) -> Bfloat16Bits:
    bits: Bfloat16Bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return bits


def rounded_to_bfloat16(values: FloatMatrix) -> FloatMatrix:
    rounded: FloatMatrix = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    return rounded


def random_values(num_rows: int, num_inputs: int, seed: int) -> FloatMatrix:
    """Return normal values, some of them fifty times as large."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_rows, num_inputs)) * np.where(rng.random((1, num_inputs)) < 0.03, 50.0, 1.0)
    return rounded_to_bfloat16(values.astype(np.float32))


def native_product(
    weight: FloatMatrix, rows: FloatMatrix, kernels: str, *, num_threads: int = 2, quantization: str = "int8"
) -> FloatMatrix:
    assert EXTENSION is not None
    product = np.full((len(rows), len(weight)), np.nan, dtype=np.float32)
    EXTENSION.multiply_rows(
        weight=bits_of(weight),
        rows=bits_of(rows),
        to=product,
        num_threads=num_threads,
        kernels=kernels,
        quantization=quantization,
    )
    return product


def quantized(values: FloatMatrix) -> tuple[NDArray[np.int64], FloatMatrix]:
    """Rotate and round rows; returns integers and the scale of each row, one operation in fp32 after the other."""
    num_rows, num_inputs = values.shape
    padded = np.zeros((num_rows, -(-num_inputs // BLOCK_INPUTS) * BLOCK_INPUTS), dtype=np.float32)
    padded[:, :num_inputs] = values
    blocks = padded.reshape(num_rows, -1, BLOCK_INPUTS)
    distance = 1
    while distance < BLOCK_INPUTS:
        pairs = blocks.reshape(num_rows, -1, 2, distance)
        blocks = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
        distance *= 2
    rotated = blocks.reshape(num_rows, -1)
    largest = np.abs(rotated).max(axis=1)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, np.float32(1)), np.float32(0))
    integers = np.rint(rotated * inverse[:, None]).astype(np.int64)
    return integers, largest * (np.float32(0.125) / np.float32(127))


def exact_product(weight: FloatMatrix, rows: FloatMatrix) -> FloatMatrix:
    weight_integers, weight_scales = quantized(weight)
    row_integers, row_scales = quantized(rows)
    sums = (row_integers @ weight_integers.T).astype(np.float32)
    product: FloatMatrix = sums * (weight_scales[None] * row_scales[:, None])
    return product


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_integers(shape: tuple[int, int, int], kernels: str) -> None:
    num_rows, num_inputs, num_columns = shape
    weight, rows = random_values(num_columns, num_inputs, 1), random_values(num_rows, num_inputs, 2)

    product = native_product(weight, rows, kernels)

    assert np.array_equal(product, exact_product(weight, rows))


@pytest.mark.parametrize("kernels", KERNELS)
def test_products_are_near_those_of_the_values(kernels: str) -> None:
    rng = np.random.default_rng(3)
    weight, rows = (rounded_to_bfloat16(rng.normal(size=(count, 576)).astype(np.float32)) for count in (300, 40))

    product = native_product(weight, rows, kernels)

    # Two roundings to 127 steps of the largest of normal values; seen: 0.012.
    exact = rows.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.linalg.norm(product - exact) / np.linalg.norm(exact) < 0.02


@pytest.mark.parametrize("kernels", KERNELS)
def test_sums_of_the_largest_values_do_not_overflow(kernels: str) -> None:
    # One value alone in each block is spread evenly by the rotation, so that all become 127.
    weight = np.zeros((33, 65_536), dtype=np.float32)
    weight[:, ::BLOCK_INPUTS] = 1.0
    rows = np.concatenate([weight[:1], -weight[:1]])

    product = native_product(weight, rows, kernels)

    assert np.array_equal(product, exact_product(weight, rows))
    assert np.allclose(product, [[1_024.0], [-1_024.0]])


def test_more_inputs_than_sums_can_hold_are_refused() -> None:
    weight = np.zeros((1, 65_537), dtype=np.float32)

    with pytest.raises(ValueError, match="65,536 inputs"):
        native_product(weight, weight, "")


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_of_zeros_and_columns_of_zeros_give_zeros(kernels: str) -> None:
    weight, rows = random_values(40, 100, 5), random_values(9, 100, 6)
    weight[7], rows[3] = 0.0, 0.0

    product = native_product(weight, rows, kernels)

    assert not product[3].any()
    assert not product[:, 7].any()
    assert np.count_nonzero(product) == 8 * 39


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_spoils_its_row_and_no_other(kernels: str, fault: float) -> None:
    weight, rows = random_values(40, 100, 5), random_values(9, 100, 6)
    expected = native_product(weight, rows, kernels)
    rows[4, 77] = fault

    product = native_product(weight, rows, kernels)

    assert not np.isfinite(product[4]).any()
    others = np.arange(9) != 4
    assert np.array_equal(product[others], expected[others])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_number_of_threads_does_not_change_products(kernels: str, quantization: str) -> None:
    weight, rows = random_values(130, 200, 7), random_values(70, 200, 8)

    products = [
        native_product(weight, rows, kernels, num_threads=count, quantization=quantization) for count in (1, 2, 5)
    ]

    assert np.array_equal(products[0], products[1])
    assert np.array_equal(products[0], products[2])


@pytest.mark.parametrize("kernels", KERNELS)
def test_bfloat16_products_are_those_of_the_values(kernels: str) -> None:
    for num_rows, num_inputs, num_columns in SHAPES[::5]:
        weight, rows = random_values(num_columns, num_inputs, 1), random_values(num_rows, num_inputs, 2)

        product = native_product(weight, rows, kernels, quantization="none")

        # Sums in fp32; instructions for pairs of bfloat16 flush what is tiny.
        exact = rows.astype(np.float64) @ weight.T.astype(np.float64)
        assert np.linalg.norm(product - exact) / np.linalg.norm(exact) < 1e-5
