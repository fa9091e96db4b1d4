"""Texts whose token ids by llama.cpp are on record in tests/data/llama_cpp_token_ids.json."""

from __future__ import annotations

import json
import random
from pathlib import Path

_RECORD_FILE = Path(__file__).parent.parent.parent / "data" / "llama_cpp_token_ids.json"

# Pieces of text that tokenizers cut in different ways, by the places where they differ.
_WORDS = ["a", "Hello", " the", "'s", "'RE", "é", "e\u0301", "日本", "🎉", "👨\u200d👩\u200d👧", "\x00"]
_SPACES_AND_DIGITS = ["  ", "\n", "\t", "\u200b", "\u3000", "1", "23", " 4", "٣", "½"]
_CONTROL = ["<", "|", "_", "{}", "<|im_end|>", "<|im_start|>", "<repo_name>"]
SMOLLM_PIECES = [*_WORDS, *_SPACES_AND_DIGITS, *_CONTROL]
_SENTENCEPIECE = [
    *("hello", " the", "the", " ", "  ", "world", "lowell", "\n"),
    *("é", "日", "🎉", "x.", "<", ">", "s", "▁"),
]


def smollm_texts() -> list[str]:
    """Return texts for SmolLM2's tokenizer."""
    return _mixed(20241, SMOLLM_PIECES, num_texts=300, max_pieces=30)


def sentencepiece_texts() -> list[str]:
    """Return texts for the small sentencepiece tokenizer.

    llama.cpp merges the plain text "<s>" into the control token; that difference has a test of its own.
    """
    return [text for text in _mixed(5, _SENTENCEPIECE, num_texts=300, max_pieces=15) if "<s>" not in text]


def recorded_ids(name: str) -> list[list[int]]:
    """Return what llama.cpp made of the texts of that name."""
    ids: list[list[int]] = json.loads(_RECORD_FILE.read_text())[name]
    return ids


def _mixed(seed: int, pieces: list[str], *, num_texts: int, max_pieces: int) -> list[str]:
    source = random.Random(seed)
    return ["".join(source.choices(pieces, k=source.randint(1, max_pieces))) for _ in range(num_texts)]
