"""Models in GGUF's number formats: what is read, and the logits that come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from services.worker.weight_files import open_weights
from tests.unit.worker.gguf_blocks import LAYOUTS
from tests.unit.worker.small_gguf import GgufType, write_gguf
from tests.unit.worker.small_models import FAMILIES, expected_logits, random_model
from tests.unit.worker.test_decoder import Loaded, blocks_for, random_tokens

# Rows of whole blocks.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class _RandomBlocks:
    """Stands in for a quantizer: gives random blocks and keeps them."""

    def __init__(self, kind: GgufType) -> None:
        self._layout = LAYOUTS[kind]
        self._rng = np.random.default_rng(5)
        self.matrices: list[NDArray[np.uint8]] = []

    def __call__(self, matrix: NDArray[np.float32]) -> NDArray[Any]:
        self.matrices.append(self._layout.random_rows(len(matrix), matrix.shape[1], self._rng))
        return self.matrices[-1]

    def values(self) -> list[list[float]]:
        """Return what the blocks mean, matrix by matrix."""
        return [self._layout.read_all(matrix.tobytes()) for matrix in self.matrices]


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_blocks_mean_what_their_layout_says(tmp_path: Path, kind: GgufType) -> None:
    model = random_model("qwen3", **SHAPE, num_hidden_layers=1, vocab_size=8)
    blocks = _RandomBlocks(kind)

    source = open_weights(write_gguf(model, tmp_path / "model.gguf", kind, quantize_matrix=blocks))

    matrices = [name for name, tensor in model.state_dict().items() if tensor.ndim == 2]
    for name, expected in zip(matrices, blocks.values(), strict=True):
        np.testing.assert_allclose(source.read(name).numpy().reshape(-1), expected, rtol=1e-5, atol=1e-7)


def _take_weights(model: PreTrainedModel, path: Path) -> None:
    source = open_weights(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name))


@pytest.mark.parametrize("kind", [GgufType.F32, GgufType.F16, GgufType.BF16, *LAYOUTS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama with biases", "gemma3"])
def test_logits_equal_transformers_with_the_same_weights(tmp_path: Path, family: str, kind: GgufType) -> None:
    model = random_model(family, **SHAPE)
    blocks = _RandomBlocks(kind) if kind in LAYOUTS else None
    path = write_gguf(model, tmp_path / "model.gguf", kind, quantize_matrix=blocks)
    _take_weights(model, path)
    loaded = Loaded.from_path(path, model)
    tokens = random_tokens(50)

    (logits,) = loaded.logits([(tokens, 0, blocks_for(50, 1))])

    expected = expected_logits(model, tokens)
    assert (logits - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen2 with windows"])
def test_logits_of_an_unquantized_file_equal_transformers(tmp_path: Path, family: str) -> None:
    model = random_model(family)
    loaded = Loaded.from_path(write_gguf(model, tmp_path / "model.gguf"), model)
    tokens = random_tokens(70)

    (logits,) = loaded.logits([(tokens, 0, blocks_for(70, 1))])

    torch.testing.assert_close(logits, expected_logits(model, tokens), atol=3e-4, rtol=1e-4)
