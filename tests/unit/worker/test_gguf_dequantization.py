from __future__ import annotations

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from services.worker.gguf_dequantization import dequantized

KINDS = [GGMLQuantizationType[name] for name in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")]


@pytest.mark.parametrize("kind", KINDS)
# One row, rows that end within a chunk, and several chunks.
@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1, 1), (37, 3), (900, 2)])
def test_values_are_those_of_the_package(kind: GGMLQuantizationType, num_rows: int, num_blocks: int) -> None:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    num_blocks *= max(1, 256 // block_values)
    # Bits at random, but scales that are numbers: 0x3c is the high byte of 1.0 in half precision.
    data = random.integers(0, 0x3C, (num_rows, num_blocks * block_bytes), dtype=np.uint8)

    values = dequantized(data, kind)

    assert values.shape == (num_rows, num_blocks * block_values)
    np.testing.assert_array_equal(values, quants.dequantize(data, kind))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16])
def test_plain_floats_are_read_as_they_are(kind: GGMLQuantizationType) -> None:
    dtype = np.float32 if kind is GGMLQuantizationType.F32 else np.float16
    values = np.arange(12, dtype=dtype).reshape(3, 4)

    np.testing.assert_array_equal(dequantized(values, kind), values)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        dequantized(np.zeros((1, 4), dtype=np.uint8), GGMLQuantizationType.I8)
