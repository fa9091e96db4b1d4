"""Record what transformers makes of Gemma 3 270M: token ids of texts, and logits in fp32.

    python -m tests.data.record_gemma

writes ``gemma3_transformers.json``. To load the file takes transformers half a minute and its tokenizer another,
which is why tests compare with a record; ``make test-slow`` compares with transformers itself.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from libs.text import ChatMessage, load_model_text, resolve_model_path
from tests.data.prompts import conversations

GEMMA_FILE = Path(__file__).parent / "gemma3_transformers.json"
# Logits of every so manieth token, and of the last positions before and after the window is full.
LOGITS_STRIDE = 512
LENGTHS = (1, 7, 64, 511, 512, 513, 514, 530, 700)
NUM_OUTPUT_TOKENS = 24
PIECES = (
    *("Hello", " world", "The quick brown fox", "\n", "\n\n", "\t", "  ", "    ", " ", "!", "é", "ß", "日本", "語"),
    *("😀", "👩\u200d🚀", "\u0000", "\u00a0", "1", "12", " 345", "<", ">", "</b>", "<b>", "def f(x):", "_", "▁"),
    *("naïve", "Ω", "\r\n", "<eos>x", "don't", "ﬁ", "\ufffd", "[multimodal]"),
)


def texts() -> list[str]:
    """Return texts that try every kind of token."""
    source = random.Random(11)
    mixed = ["".join(source.choices(PIECES, k=source.randint(1, 20))) for _ in range(150)]
    return [*PIECES, *mixed, *(message["content"] for chat in conversations() for message in chat)]


def long_prompt(encode: Any) -> list[int]:
    """Return BOS and text, longer than the window of 512."""
    token_ids: list[int] = encode("\n\n".join(text for text in texts() if len(text) > 40))
    return [2, *token_ids][: LENGTHS[-1]]


@torch.inference_mode()
def main() -> None:
    """Run the reference and write the file."""
    path = resolve_model_path("gemma3-270m")
    text = load_model_text(path)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    prompt = long_prompt(lambda value: text.tokenizer.encode(value, allow_special=False))
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    logits = model(torch.tensor([prompt])).logits[0]
    chat = [ChatMessage("user", "Name three primes.")]
    question = text.chat_template.render_token_ids(chat, text.tokenizer, add_generation_prompt=True)
    answer = model.generate(
        torch.tensor([question]), max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False, eos_token_id=None
    )
    record = {
        "texts": [[value, tokenizer.encode(value, add_special_tokens=False)] for value in texts()],
        "prompt_token_ids": prompt,
        "logits": [[round(x, 4) for x in logits[n - 1, ::LOGITS_STRIDE].tolist()] for n in LENGTHS],
        "largest": [logits[n - 1].topk(5).indices.tolist() for n in LENGTHS],
        "question_token_ids": question,
        "answer_token_ids": answer[0, len(question) :].tolist(),
    }
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    GEMMA_FILE.write_text("{\n" + rows + "\n}\n")


if __name__ == "__main__":
    main()
