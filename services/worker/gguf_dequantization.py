"""Values of a quantized GGUF tensor, computed by several threads.

Owns how a tensor is divided. It must not know the formats: the package ``gguf`` does. Its own ``dequantize`` takes
sixteen rows at a time, for which a small model's narrow rows spend most of the time between operations.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import NDArray

# Half a MiB of values: they stay in a core's cache while they are computed.
_CHUNK_VALUES = 2**17


def dequantized(data: NDArray[Any], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """Return the values of a tensor ``[num_rows, bytes of a row]`` as ``[num_rows, values of a row]``.

    Raises:
        NotImplementedError: when the package cannot read the format.
    """
    codec = getattr(quants, kind.name, None)
    if codec is None:
        # Formats without blocks, and those that the package does not know.
        values: NDArray[np.float32] = quants.dequantize(data, kind)
        return values
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(-1, block_bytes)
    values = np.empty((len(blocks), block_values), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // block_values)

    def fill(first: int) -> None:
        values[first : first + step] = codec.dequantize_blocks(blocks[first : first + step])

    firsts = range(0, len(blocks), step)
    if len(firsts) == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(min(len(firsts), os.cpu_count() or 1)) as threads:
            # Raises what a thread has raised.
            list(threads.map(fill, firsts))
    return values.reshape(*data.shape[:-1], -1)
