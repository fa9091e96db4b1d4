"""The recorded answers of transformers, and how to compare ours with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from libs.text import IncrementalDetokenizer, ModelText, load_model_text, resolve_model_path
from tests.data.prompts import conversations

_FILE = Path(__file__).parent.parent / "data" / "reference_fp32.json"


@dataclass(frozen=True, slots=True)
class Reference:
    """One conversation and its greedy answer in fp32; ``gaps`` tells how near a tie each token was."""

    messages: Any  # Any: the client wants its own types for the same shape.
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    gaps: list[float]

    @property
    def text(self) -> str:
        """The answer as text, without the end token."""
        detokenizer = IncrementalDetokenizer(model_text().tokenizer, skip_special_tokens=True)
        return detokenizer.add(self.output_token_ids) + detokenizer.flush()


@cache
def model_text() -> ModelText:
    """The text side of the embedded model."""
    return load_model_text(resolve_model_path("smollm2-135m-instruct"))


def references() -> list[Reference]:
    """Return the twenty conversations with their answers."""
    rows = json.loads(_FILE.read_text())
    return [
        Reference(messages, row["prompt_token_ids"], row["output_token_ids"], row["gaps"])
        for messages, row in zip(conversations(), rows, strict=True)
    ]
