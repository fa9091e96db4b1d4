"""Measure what int8 weights cost in quality, beside bfloat16; one JSON object is the last line.

Both compute the logits of each token of a text in strided windows: a token is scored once, with at least
``--window`` less ``--stride`` tokens before it (fewer only at the start of the text). Reported are both
perplexities and the share of positions at which both would choose the same token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from libs.text import load_model_text, resolve_model_path
from services.worker.config import Quantization, WorkerConfig
from services.worker.kernels.cpu.extension import NativeModel, load_extension
from services.worker.kernels.cpu.forward_pass import NativeForwardPass
from services.worker.kv_cache import KVCachePlan
from services.worker.weight_files import open_weights
from services.worker.weights import WeightReader, WeightSource

ROOT = Path(__file__).resolve().parent.parent
BLOCK_SIZE = 16
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Windows:
    """How a text is cut, in tokens."""

    size: int = 512
    stride: int = 256

    def of(self, num_tokens: int) -> list[tuple[int, int, int]]:
        """Return (start, first token to score, end) of each window; tokens from the second on are scored once."""
        windows, first = [], 1
        while first < num_tokens:
            start = max(0, first - (self.size - self.stride))
            end = min(start + self.size, num_tokens)
            windows.append((start, first, end))
            first = end
        return windows


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a model says of each token of a text but the first."""

    losses: NDArray[np.float64]  # [num_tokens - 1]: minus the logarithm of the token's probability
    choices: NDArray[np.int64]  # [num_tokens - 1]: the most probable token in its place

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return float(np.exp(self.losses.mean()))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Quantized weights beside those that are not."""

    num_tokens: int
    perplexity: float
    quantized_perplexity: float
    greedy_agreement: float

    @property
    def perplexity_change(self) -> float:
        """By which part the perplexity grows."""
        return self.quantized_perplexity / self.perplexity - 1.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=WorkerConfig().model, help="as --model of the worker")
    parser.add_argument("--threads", type=int, default=WorkerConfig().num_threads_used)
    parser.add_argument("--window", type=int, default=Windows().size, help="tokens computed together")
    parser.add_argument("--stride", type=int, default=Windows().stride, help="tokens scored in a window")
    parser.add_argument("text", nargs="*", type=Path, help="files; by default this repository's documents")
    options = parser.parse_args()
    if load_extension() is None:
        sys.exit("The kernels are not built: python -m services.worker.kernels.cpu.build")
    if not 0 < options.stride <= options.window:
        sys.exit("--stride must be between 1 and --window.")
    files = options.text or documents()
    windows = Windows(options.window, options.stride)
    found = compare(options.model, text_of(files), windows, num_threads=options.threads)
    print(
        json.dumps(
            {
                "model": options.model,
                "num_files": len(files),
                "num_tokens": found.num_tokens,
                "window": windows.size,
                "stride": windows.stride,
                "perplexity_bfloat16": round(found.perplexity, 4),
                "perplexity_int8": round(found.quantized_perplexity, 4),
                "perplexity_change_percent": round(100 * found.perplexity_change, 3),
                "greedy_agreement_percent": round(100 * found.greedy_agreement, 2),
            }
        )
    )


def documents() -> list[Path]:
    """Return this repository's documents in a fixed order."""
    return [path for pattern in ("*.md", "docs/*.md", "docs/decisions/*.md") for path in sorted(ROOT.glob(pattern))]


def text_of(files: Sequence[Path]) -> str:
    """Return the files as one text."""
    return "\n\n".join(path.read_text() for path in files)


def compare(model: str, text: str, windows: Windows, *, num_threads: int) -> Comparison:
    """Score a text with weights in bfloat16 and in int8."""
    path = resolve_model_path(model)
    source = open_weights(path)
    token_ids = np.array(load_model_text(path).tokenizer.encode(text, allow_special=False), dtype=np.int64)
    exact, quantized = (
        score(_load(source, quantization, windows, num_threads), source.config.vocab_size, token_ids, windows)
        for quantization in (Quantization.NONE, Quantization.INT8)
    )
    return Comparison(
        num_tokens=len(token_ids),
        perplexity=exact.perplexity,
        quantized_perplexity=quantized.perplexity,
        greedy_agreement=float((exact.choices == quantized.choices).mean()),
    )


def score(model: NativeForwardPass, vocab_size: int, token_ids: NDArray[np.int64], windows: Windows) -> Scores:
    """Score each token of ``token_ids`` ``[num_tokens]`` but the first."""
    losses, choices = [], []
    for start, first, end in windows.of(len(token_ids)):
        # The logits of a position are those of the next token.
        logits = _logits(model.native_model, vocab_size, token_ids[start : end - 1], first - 1 - start)
        highest = logits.max(axis=-1)
        totals = np.exp(logits - highest[:, None], dtype=np.float32).sum(axis=-1, dtype=np.float64)
        expected = np.take_along_axis(logits, token_ids[first:end, None], axis=-1)[:, 0]
        losses.append(highest + np.log(totals) - expected)
        choices.append(logits.argmax(axis=-1))
    return Scores(np.concatenate(losses), np.concatenate(choices))


def _logits(
    model: NativeModel, vocab_size: int, token_ids: NDArray[np.int64], first_row: int
) -> NDArray[np.float32]:
    """Compute a window ``[num_tokens]`` alone; returns the logits from ``first_row`` on."""
    num_tokens = len(token_ids)
    positions = np.arange(num_tokens, dtype=np.int64)
    is_finite = np.empty(num_tokens, dtype=np.uint8)
    logits = np.empty((num_tokens - first_row, vocab_size), dtype=np.float32)
    model.forward(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=positions,
        num_queries=np.array([num_tokens]),
        block_tables=np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)[None],
        sampled_rows=positions[first_row:],
        logits=logits,
        is_finite=is_finite,
    )
    assert is_finite.all(), "a hidden state is not a number"
    return logits


def _load(
    source: WeightSource, quantization: Quantization, windows: Windows, num_threads: int
) -> NativeForwardPass:
    extension = load_extension()
    assert extension is not None, "the kernels are not built"
    config = source.config
    loaded = NativeForwardPass(
        extension,
        config,
        WeightReader(source, _DTYPE, lambda done, total: None),
        block_size=BLOCK_SIZE,
        num_threads=num_threads,
        quantization=quantization,
    )
    values = config.num_layers * BLOCK_SIZE * 2 * config.num_kv_heads * config.head_dim
    num_blocks = -(-windows.size // BLOCK_SIZE)
    loaded.make_cache(
        KVCachePlan(num_blocks=num_blocks, block_size=BLOCK_SIZE, bytes_per_block=values * _DTYPE.itemsize)
    )
    return loaded


if __name__ == "__main__":
    main()
