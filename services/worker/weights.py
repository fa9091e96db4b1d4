"""Weights of a model on disk: its shape, its named tensors, and how far reading them is.

Owns the model's configuration type, the checks that what is on disk can be served, and the choice of the
format. It must not know how a model computes. Names are those of the transformers library, for all formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from libs.errors import ModelLoadFailed

LLAMA = "LlamaForCausalLM"

# Tensors that some files carry and that are derived from the configuration here.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Rotary frequencies stretched for long contexts, the way of Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Divisors of the rotary frequencies, as GGUF files store any scaling of this kind."""

    factors: tuple[float, ...]


RopeScaling = Llama3RopeScaling | FrequencyFactors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a model."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    has_tied_embeddings: bool
    max_position: int

    def __post_init__(self) -> None:
        if self.architecture != LLAMA:
            raise ModelLoadFailed(f"The architecture {self.architecture!r} is not served; only {LLAMA} is.")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelLoadFailed(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 2:
            raise ModelLoadFailed(f"A head of {self.head_dim} values cannot be rotated in pairs.")

    @property
    def num_parameters(self) -> int:
        """Values of all weights."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size + 2)
        num_vocab_matrices = 1 if self.has_tied_embeddings else 2
        return self.num_layers * layer + (num_vocab_matrices * self.vocab_size + 1) * self.hidden_size


class WeightSource(Protocol):
    """Named tensors of one model on disk."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """Bytes on disk of each tensor by name."""
        ...

    def read(self, name: str) -> Tensor:
        """Return one tensor, dequantized if need be; its dtype may be any float type."""
        ...


class WeightReader:
    """Reads the tensors that a model asks for, in its dtype, with checked shapes and with progress."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, on_bytes: Callable[[int, int], None]) -> None:
        self._source = source
        self._dtype = dtype
        self._on_bytes = on_bytes
        self._sizes_bytes = source.sizes_bytes
        self._unread = set(self._sizes_bytes)
        self._loaded_bytes = 0
        self.kept_bytes = 0  # of all tensors read, in the model's dtype

    @property
    def total_bytes(self) -> int:
        """Bytes on disk of all tensors."""
        return sum(self._sizes_bytes.values())

    def read(self, name: str, *shape: int) -> Tensor:
        """Return the tensor ``name``.

        Raises:
            ModelLoadFailed: when it is missing or has another shape.
        """
        if name not in self._sizes_bytes:
            raise ModelLoadFailed(f"The tensor {name} is missing from the weights.")
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadFailed(
                f"The tensor {name} has shape {tuple(tensor.shape)}, but the model's configuration says {shape}."
            )
        self._unread.discard(name)
        self._loaded_bytes += self._sizes_bytes[name]
        self._on_bytes(self._loaded_bytes, self.total_bytes)
        tensor = tensor.to(self._dtype)
        self.kept_bytes += tensor.nbytes
        return tensor

    def skip(self, name: str) -> None:
        """Leave out a tensor that the model knows and does not need."""
        if name in self._unread:
            self._unread.discard(name)
            self._loaded_bytes += self._sizes_bytes[name]

    def finish(self) -> None:
        """Refuse weights with tensors that nobody asked for: they would change the model's results."""
        unknown = sorted(name for name in self._unread if not name.endswith(_DERIVED_SUFFIXES))
        if unknown:
            raise ModelLoadFailed(
                f"The weights have {len(unknown)} tensors that {self._source.config.architecture} does not use "
                f"here, for example {unknown[0]}; this variant of the model is not served."
            )
