"""Weights of a model on disk: its shape, its named tensors, and how far reading them is.

Owns the model's configuration type, the checks that what is on disk can be served, and the choice of the
format. It must not know how a model computes. Names are those of the transformers library, for all formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from libs.errors import ModelLoadFailed

LLAMA = "LlamaForCausalLM"
MISTRAL = "MistralForCausalLM"
QWEN2 = "Qwen2ForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
GEMMA3 = "Gemma3ForCausalLM"
ARCHITECTURES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3)

# More than any model has: what says more is damaged, and is not to be believed by anything that it would size.
MAX_LAYERS = 4_096
_MAX_POSITION = 2**31 - 1
_MAX_SIZE = 2**24

# Tensors that some files carry and that are derived from the configuration here.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Rotary frequencies divided by one factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Rotary frequencies stretched for long contexts, the way of Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """Rotary frequencies stretched the way of YaRN (Peng et al., 2023, section 3)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    # What cosines and sines are multiplied by.
    amplitude: float
    # Whether the borders of the blend are whole pairs of a head.
    has_whole_borders: bool


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Divisors of the rotary frequencies, as GGUF files store any scaling of this kind."""

    factors: tuple[float, ...]


def layer_count(value: Any, path: Path) -> int:
    """Return how many layers a model's file says that it has. Any: the file may say anything.

    Raises:
        ModelLoadFailed: when no model has so many.
    """
    num_layers = int(value)
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelLoadFailed(f"{path} says that the model has {num_layers} layers; from 1 to {MAX_LAYERS} can be.")
    return num_layers


def yarn_amplitude(factor: float, weight: float = 1.0) -> float:
    """Return the amplitude that YaRN's authors found best for a stretch by ``factor`` (section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | FrequencyFactors


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions: the base of the frequencies and their scaling."""

    theta: float
    scaling: RopeScaling | None


_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position",
)


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
    # How many of the last tokens a token sees in each layer, itself included; None is all. Empty: all everywhere.
    layer_windows: tuple[int | None, ...] = ()
    # Rotary base of the layers with a window where it is one of their own; such layers do not scale it.
    window_rope_theta: float | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    # What scores are multiplied by; None is one over the root of the head size.
    attention_scale: float | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelLoadFailed(
                f"The architecture {self.architecture!r} is not served; these are: {', '.join(ARCHITECTURES)}."
            )
        for name in _SIZES:
            if not 1 <= getattr(self, name) <= (_MAX_POSITION if name == "max_position" else _MAX_SIZE):
                raise ModelLoadFailed(f"A model whose {name} is {getattr(self, name)} cannot be served.")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelLoadFailed(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 2:
            raise ModelLoadFailed(f"A head of {self.head_dim} values cannot be rotated in pairs.")
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ModelLoadFailed(f"The model has {self.num_layers} layers, but {len(self.layer_windows)} windows.")
        if any(window is not None and window < 1 for window in self.layer_windows):
            raise ModelLoadFailed("A sliding window of less than one token leaves nothing to attend to.")
        if isinstance(self.rope_scaling, FrequencyFactors) and len(self.rope_scaling.factors) != self.head_dim // 2:
            raise ModelLoadFailed(
                f"{len(self.rope_scaling.factors)} frequency factors do not fit heads of {self.head_dim} values."
            )
        if not all(map(_is_positive, _rotary_constants(self))):
            raise ModelLoadFailed(
                f"Rotary positions need bases, factors and lengths above 0, not {self.rope_theta:g} with "
                f"{self.rope_scaling}."
            )

    @property
    def has_head_norms(self) -> bool:
        """Whether queries and keys are normed head by head."""
        return self.architecture in (QWEN3, GEMMA3)

    @property
    def has_norms_after(self) -> bool:
        """Whether what an operation adds is normed."""
        return self.architecture == GEMMA3

    @property
    def num_parameters(self) -> int:
        """Values of all weights."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        matrices = self.hidden_size * (2 * query_size + 2 * kv_size + 3 * self.intermediate_size)
        norms = (4 if self.has_norms_after else 2) * self.hidden_size
        head_norms = 2 * self.head_dim if self.has_head_norms else 0
        biases = self.has_qkv_bias * (query_size + 2 * kv_size) + self.has_output_bias * self.hidden_size
        num_vocab_matrices = 1 if self.has_tied_embeddings else 2
        return (
            self.num_layers * (matrices + norms + head_norms + biases)
            + (num_vocab_matrices * self.vocab_size + 1) * self.hidden_size
        )

    def window_of(self, layer: int) -> int | None:
        """Return how many of the last tokens a token sees in this layer, or None for all."""
        return self.layer_windows[layer] if self.layer_windows else None

    def rotary_of(self, layer: int) -> Rotary:
        """Return the rotary positions of this layer."""
        if self.window_rope_theta is not None and self.window_of(layer) is not None:
            return Rotary(self.window_rope_theta, None)
        return Rotary(self.rope_theta, self.rope_scaling)


def _rotary_constants(config: ModelConfig) -> Iterator[float]:
    """Yield what angles are divided by."""
    yield config.rope_theta
    if config.window_rope_theta is not None:
        yield config.window_rope_theta
    match config.rope_scaling:
        case None:
            pass
        case FrequencyFactors(factors):
            yield from factors
        case LinearRopeScaling(factor):
            yield factor
        case YarnRopeScaling() as scaling:
            yield from (scaling.factor, scaling.original_max_position, scaling.beta_fast, scaling.beta_slow)
        case Llama3RopeScaling() as scaling:
            # What lies between the two is blended.
            yield from (scaling.factor, scaling.original_max_position, scaling.low_freq_factor)
            yield scaling.high_freq_factor - scaling.low_freq_factor


def _is_positive(value: float) -> bool:
    return 0.0 < value < math.inf


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
        self.kept_bytes = 0  # of all tensors read, as they are kept

    @property
    def total_bytes(self) -> int:
        """Bytes on disk of all tensors."""
        return sum(self._sizes_bytes.values())

    def read(self, name: str, *shape: int, kept: tuple[slice, ...] = ()) -> Tensor:
        """Return the tensor ``name`` of this shape in the model's dtype, or what is ``kept`` of its dimensions.

        Raises:
            ModelLoadFailed: when it is missing or has another shape.
        """
        return self._read(name, shape, kept, self._dtype)

    def read_fp32(self, name: str, *shape: int, kept: tuple[slice, ...] = ()) -> Tensor:
        """Return the same in fp32, for what is computed in fp32 whatever the model's dtype is.

        Raises:
            ModelLoadFailed: when it is missing or has another shape.
        """
        return self._read(name, shape, kept, torch.float32)

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

    def _read(self, name: str, shape: tuple[int, ...], kept: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
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
        # A copy, so that the rest of the stored tensor is given up.
        tensor = tensor[kept].to(dtype, copy=True).contiguous() if kept else tensor.to(dtype)
        self.kept_bytes += tensor.nbytes
        return tensor
