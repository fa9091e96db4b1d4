"""Record how llama.cpp tokenizes the texts of the tokenizer tests.

    pip install llama-cpp-python && python -m tests.data.record_llama_cpp

writes ``llama_cpp_token_ids.json``. The package is built from source, which takes minutes, so the tests read the
record instead.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from libs.text import resolve_model_path
from tests.unit.text.recorded_texts import sentencepiece_texts, smollm_texts
from tests.unit.text.small_models import sentencepiece_keys, write_gguf

RECORD_FILE = Path(__file__).parent / "llama_cpp_token_ids.json"


def main() -> None:
    """Tokenize and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.gguf"
        write_gguf(small, tokenizer=sentencepiece_keys())
        record = {
            "smollm": tokenize(resolve_model_path("smollm2-135m-instruct"), smollm_texts(), special=False),
            "smollm_special": tokenize(resolve_model_path("smollm2-135m-instruct"), smollm_texts(), special=True),
            "sentencepiece": tokenize(small, sentencepiece_texts(), special=False),
        }
    RECORD_FILE.write_text(json.dumps(record) + "\n")


def tokenize(path: Path, texts: list[str], *, special: bool) -> list[list[int]]:
    """Return the ids of each text."""
    import llama_cpp  # Only the recorder needs it.

    model: Any = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)
    ids = [model.tokenize(text.encode(), add_bos=False, special=special) for text in texts]
    model.close()
    return ids


if __name__ == "__main__":
    main()
