"""The compiled extension as Python sees it.

Owns finding and loading it and the types of its calls. It must not know what a model's tensors are named.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from services.worker.kernels.cpu.build import built_file

Bfloat16Bits = NDArray[np.uint16]  # bfloat16 values as their bits: numpy has no such type
FloatVector = NDArray[np.float32]
Int64Vector = NDArray[np.int64]

_MODULE_NAME = "services.worker.kernels.cpu._native"


class NativeCollective(Protocol):
    """A rank's place in memory that the ranks of a group share."""

    @property
    def is_broken(self) -> bool:
        """Whether a rank had left or came too late at the last meeting: results since then mean nothing."""
        ...

    @property
    def wait_seconds(self) -> float:
        """Time spent waiting for other ranks since the beginning."""
        ...


class NativeCollectiveFactory(Protocol):
    """The constructor of ``NativeCollective``."""

    def __call__(
        self,
        *,
        memory: NDArray[np.uint8],
        rank: int,
        num_ranks: int,
        parts_offset: int,
        part_bytes: int,
        timeout_seconds: float,
    ) -> NativeCollective:
        """Use the shared memory, whose layout is that of ``services.worker.exchange``."""
        ...


class NativeModel(Protocol):
    """A model's packed weights, its threads and the memory of its steps."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        ...

    @property
    def kernels(self) -> str:
        """Name of the instruction set in use."""
        ...

    def set_embedding(self, weight: Bfloat16Bits, scale: float) -> None:
        """Pack the embedding ``[vocab_size, hidden_size]``; what comes in is multiplied by ``scale``."""
        ...

    def add_attention(
        self,
        *,
        norm: FloatVector,
        query: Bfloat16Bits,
        key: Bfloat16Bits,
        value: Bfloat16Bits,
        output: Bfloat16Bits,
        query_bias: FloatVector | None,
        key_bias: FloatVector | None,
        value_bias: FloatVector | None,
        output_bias: FloatVector | None,
        query_norm: FloatVector | None,
        key_norm: FloatVector | None,
        norm_after: FloatVector | None,
        rotation: int,
        window: int,
        softmax_scale: float,
    ) -> None:
        """Append an attention with the rotary positions of this index; a window of 0 is none."""
        ...

    def add_feed_forward(
        self,
        *,
        norm: FloatVector,
        gate: Bfloat16Bits,
        up: Bfloat16Bits,
        down: Bfloat16Bits,
        activation: object,
        norm_after: FloatVector | None,
    ) -> None:
        """Append a gated feed-forward; the activation is one of the module's."""
        ...

    def set_head(self, norm: FloatVector, weight: Bfloat16Bits | None, first: int, count: int) -> None:
        """Set the final norm and the head of ``count`` tokens from ``first`` on.

        Without a weight it is those rows of the embedding; ``first`` must be a multiple of 32 then.
        """
        ...

    def join(self, collective: NativeCollective) -> None:
        """Put results together with those of the other ranks, which must run the same steps."""
        ...

    def bind_cache(self, layers: Sequence[Bfloat16Bits]) -> None:
        """Use this memory, ``[num_blocks, values of a block]`` for each attention, as the KV cache."""
        ...

    def forward(
        self,
        *,
        token_ids: Int64Vector,
        positions: Int64Vector,
        slot_mapping: Int64Vector,
        num_queries: Int64Vector,
        block_tables: NDArray[np.int32],
        sampled_rows: Int64Vector,
        logits: NDArray[np.float32],
        is_finite: NDArray[np.uint8],
    ) -> None:
        """Compute a step into ``logits`` (a row for each sampled row) and ``is_finite`` (one for each token)."""
        ...

    def head(self, *, rows: Int64Vector, logits: NDArray[np.float32]) -> None:
        """Compute the logits of rows of the last step, ``[num_rows, vocab_size]``."""
        ...

    def read_bandwidth(self, num_bytes: int, num_rounds: int) -> float:
        """Measure how many bytes a second all threads read; the best of several rounds in each of two orders."""
        ...

    def weight_bandwidth(self, max_bytes: int, num_rounds: int) -> float:
        """Measure the same over the packed weights, at most ``max_bytes`` of them; needs no memory of its own."""
        ...

    def multiply_rate(self, num_rounds: int, quantization: str = "none") -> float:
        """Measure how many operations a second all threads do in registers; the best of several rounds.

        They are those of the products of bfloat16 weights, or with ``quantization="int8"`` of int8 weights.
        """
        ...


class NativeModelFactory(Protocol):
    """The constructor of ``NativeModel``."""

    def __call__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        block_size: int,
        rms_norm_eps: float,
        frequencies: NDArray[np.float32],
        amplitudes: FloatVector,
        num_threads: int,
        kernels: str,
        quantization: str,
    ) -> NativeModel:
        """Make a model without weights.

        ``frequencies`` ``[num_rotations, head_dim / 2]`` and ``amplitudes`` ``[num_rotations]`` are its kinds of
        rotary positions. An empty ``kernels`` chooses the fastest that this processor has. ``quantization`` is
        ``none`` or ``int8``.
        """
        ...


class NativeActivations(Protocol):
    """The activations by name."""

    SILU: object
    GELU_TANH: object


class EditArrays(Protocol):
    """The edits of a step's rows, handed over."""


class EditArraysFactory(Protocol):
    """The constructor of ``EditArrays``."""

    def __call__(
        self,
        *,
        rows: Int64Vector,
        masks: NDArray[np.int32],
        mask_counts: Int64Vector,
        banned_ids: Int64Vector,
        ban_counts: Int64Vector,
        bias_ids: Int64Vector,
        biases: FloatVector,
        bias_counts: Int64Vector,
        penalties: NDArray[np.float64],
        history: NDArray[np.int32],
        history_counts: Int64Vector,
        num_prompt_tokens: Int64Vector,
    ) -> EditArrays:
        """Keep the arrays; what belongs to a row lies after what belongs to those before it."""
        ...


class MeasuredArrays(Protocol):
    """Room for the log-probabilities of a step's rows, handed over."""


class MeasuredArraysFactory(Protocol):
    """The constructor of ``MeasuredArrays``."""

    def __call__(
        self,
        *,
        num_alternatives: Int64Vector,
        logprobs: FloatVector,
        ranks: Int64Vector,
        alternative_ids: NDArray[np.int64],
        alternative_logprobs: NDArray[np.float32],
    ) -> MeasuredArrays:
        """Keep the arrays, which have a row for each row; a count below 0 wants none."""
        ...


class NativeSampler(Protocol):
    """The sampler of one vocabulary and its threads."""

    def sample(
        self,
        *,
        logits: NDArray[np.float32],
        inverse_temperatures: FloatVector,
        top_k: Int64Vector,
        top_p: NDArray[np.float64],
        least_scores: FloatVector,
        draw_keys: NDArray[np.uint32],
        edits: EditArrays,
        measured: MeasuredArrays,
        token_ids: Int64Vector,
        statuses: NDArray[np.uint8],
    ) -> None:
        """Choose a token for each row of ``logits`` ``[num_rows, vocab_size]`` into the last three."""
        ...

    def measure(
        self,
        *,
        logits: NDArray[np.float32],
        token_ids: Int64Vector,
        measured: MeasuredArrays,
        is_finite: NDArray[np.uint8],
    ) -> None:
        """Measure a token of each row into the last two."""
        ...


class NativeSamplerFactory(Protocol):
    """The constructor of ``NativeSampler``."""

    def __call__(
        self, *, vocab_size: int, num_threads: int, model: NativeModel | None, kernels: str
    ) -> NativeSampler:
        """Make a sampler on the threads of ``model``, which must be complete, or on its own.

        An empty ``kernels`` chooses the fastest that this processor has.
        """
        ...


class Extension(Protocol):
    """The module."""

    NativeModel: NativeModelFactory
    NativeCollective: NativeCollectiveFactory
    Activation: NativeActivations
    EditArrays: EditArraysFactory
    MeasuredArrays: MeasuredArraysFactory
    NativeSampler: NativeSamplerFactory

    def multiply_rows(
        self,
        *,
        weight: Bfloat16Bits,
        rows: Bfloat16Bits,
        to: FloatVector,
        num_threads: int,
        kernels: str,
        quantization: str,
    ) -> None:
        """Map ``rows`` ``[num_rows, num_inputs]`` by ``weight`` ``[num_columns, num_inputs]`` into ``to``.

        The weight is packed and multiplied as a step does with one of its weights.
        """
        ...

    def supported_kernels(self) -> list[str]:
        """Return the names of the instruction sets that this processor can run, the fastest first."""
        ...

    def supported_row_kernels(self) -> list[str]:
        """Return the same for the sampler's."""
        ...


@cache
def load_extension() -> Extension | None:
    """Return the extension, or None when it is not built from the sources as they are."""
    path = built_file()
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path) if path.exists() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_MODULE_NAME] = module
    return cast(Extension, module)  # The module's functions are native; their types are what is said above.
