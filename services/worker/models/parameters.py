"""The parameters that a description names, read from weights.

Owns what of a parameter is prepared while it is read. It must not know what executes the description.
"""

from __future__ import annotations

from torch import Tensor

from services.worker.models.description import Norm, Projection
from services.worker.weights import WeightReader


def read_weight(reader: WeightReader, projection: Projection) -> Tensor:
    """Return the weight ``[num_outputs, num_inputs]`` in the model's dtype."""
    part = projection.part
    if part is None:
        return reader.read(projection.weight, projection.num_outputs, projection.num_inputs)
    return reader.read(
        projection.weight,
        part.num_stored_outputs,
        part.num_stored_inputs,
        kept=(_kept(part.first_output, projection.num_outputs), _kept(part.first_input, projection.num_inputs)),
    )


def read_bias(reader: WeightReader, projection: Projection) -> Tensor:
    """Return the bias ``[num_outputs]`` in fp32; the projection must have one."""
    assert projection.bias is not None, f"{projection.weight} has no bias"
    part = projection.part
    if part is None:
        return reader.read_fp32(projection.bias, projection.num_outputs)
    kept = (_kept(part.first_output, projection.num_outputs),)
    return reader.read_fp32(projection.bias, part.num_stored_outputs, kept=kept)


def read_norm(reader: WeightReader, norm: Norm) -> Tensor:
    """Return what normed values are multiplied by, ``[size]`` fp32."""
    return reader.read_fp32(norm.weight, norm.size) + norm.offset


def _kept(first: int, count: int) -> slice:
    return slice(first, first + count)
