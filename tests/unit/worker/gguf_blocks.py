"""An independent reading of GGUF's quantized blocks, value by value, after llama.cpp's ggml-common.h."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray

GgufType = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class BlockLayout:
    """How many values a block has, in how many bytes, where its half-precision scales are, and its reading."""

    num_values: int
    num_bytes: int
    scale_offsets: tuple[int, ...]
    read: Callable[[bytes], list[float]]

    def read_all(self, data: bytes) -> list[float]:
        blocks = [data[start : start + self.num_bytes] for start in range(0, len(data), self.num_bytes)]
        return [value for block in blocks for value in self.read(block)]

    def random_rows(self, num_rows: int, num_columns: int, rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return rows of random blocks whose values are about as large as weights are."""
        blocks = rng.integers(0, 256, (num_rows * num_columns // self.num_values, self.num_bytes), dtype=np.uint8)
        for offset in self.scale_offsets:
            scales = rng.uniform(0.5, 1.5, len(blocks)) * (0.25 / 30 / (32 if self.num_values == 256 else 1))
            blocks[:, offset : offset + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
        return blocks.reshape(num_rows, -1)


def _half(data: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", data, offset)[0])


def _q8_0(block: bytes) -> list[float]:
    scale = _half(block, 0)
    return [scale * value for value in struct.unpack_from("32b", block, 2)]


def _q4_0(block: bytes) -> list[float]:
    scale, quants = _half(block, 0), block[2:]
    return [scale * ((byte & 15) - 8) for byte in quants] + [scale * ((byte >> 4) - 8) for byte in quants]


def _q4_1(block: bytes) -> list[float]:
    scale, least, quants = _half(block, 0), _half(block, 2), block[4:]
    return [scale * (byte & 15) + least for byte in quants] + [scale * (byte >> 4) + least for byte in quants]


def _q5_0(block: bytes) -> list[float]:
    scale, (high,), quants = _half(block, 0), struct.unpack_from("<I", block, 2), block[6:]
    low_half = [(byte & 15) | (high >> index & 1) << 4 for index, byte in enumerate(quants)]
    high_half = [(byte >> 4) | (high >> index + 16 & 1) << 4 for index, byte in enumerate(quants)]
    return [scale * (value - 16) for value in low_half + high_half]


def _q4_k(block: bytes) -> list[float]:
    scale, least, packed, quants = _half(block, 0), _half(block, 2), block[4:16], block[16:]

    def scale_and_least(part: int) -> tuple[int, int]:
        if part < 4:
            return packed[part] & 63, packed[part + 4] & 63
        return (
            (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4,
            (packed[part + 4] >> 4) | (packed[part] >> 6) << 4,
        )

    values: list[float] = []
    for part in range(8):
        part_scale, part_least = scale_and_least(part)
        shift = 4 * (part % 2)
        values += [
            scale * part_scale * (byte >> shift & 15) - least * part_least
            for byte in quants[part // 2 * 32 : part // 2 * 32 + 32]
        ]
    return values


def _q6_k(block: bytes) -> list[float]:
    low, high, scales, scale = block[:128], block[128:192], struct.unpack_from("16b", block, 192), _half(block, 208)
    values: list[float] = []
    for half in range(2):
        for quarter in range(4):
            for index in range(32):
                byte = low[64 * half + 32 * (quarter % 2) + index]
                four_bits = byte >> 4 if quarter >= 2 else byte & 15
                two_bits = high[32 * half + index] >> 2 * quarter & 3
                part = 8 * half + 2 * quarter + index // 16
                values.append(scale * scales[part] * ((four_bits | two_bits << 4) - 32))
    return values


LAYOUTS: Mapping[GgufType, BlockLayout] = {
    GgufType.Q8_0: BlockLayout(32, 34, (0,), _q8_0),
    GgufType.Q4_0: BlockLayout(32, 18, (0,), _q4_0),
    GgufType.Q4_1: BlockLayout(32, 20, (0, 2), _q4_1),
    GgufType.Q5_0: BlockLayout(32, 22, (0,), _q5_0),
    GgufType.Q4_K: BlockLayout(256, 144, (0, 2), _q4_k),
    GgufType.Q6_K: BlockLayout(256, 210, (208,), _q6_k),
}
