from __future__ import annotations

import pytest
import torch

from services.worker.layers.linear import PlainLinear, make_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    rows = torch.randn(33, 64, generator=generator).to(dtype)

    with torch.inference_mode():
        packed, plain = make_linear(weight)(rows), PlainLinear(weight)(rows)

    # The order of the sums differs, and bf16 rounds the result to 8 bits.
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(packed, plain, atol=tolerance * 8, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(960, 576), (576, 1536), (49_152 // 8, 576)])
def test_a_row_does_not_depend_on_the_number_of_rows(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(150, num_inputs, generator=generator).to(dtype)
    with torch.inference_mode():
        linear = make_linear(torch.randn(num_outputs, num_inputs, generator=generator).to(dtype))
        together = linear(rows)

        for count in (1, 2, 7, 16, 33, 64):
            assert torch.equal(linear(rows[:count]), together[:count])
