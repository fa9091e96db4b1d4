"""Record what transformers makes of the twenty conversations: greedy, fp32, 64 tokens each.

    python -m tests.data.record_reference

writes ``reference_fp32.json``: for each conversation the ids of prompt and output, and after each output token
the gap between the two largest logits, which says how near a tie was.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from libs.text import ChatMessage, load_model_text, resolve_model_path
from tests.data.prompts import conversations

REFERENCE_FILE = Path(__file__).parent / "reference_fp32.json"
NUM_OUTPUT_TOKENS = 64


def main() -> None:
    """Run the reference and write the file."""
    path = resolve_model_path("smollm2-135m-instruct")
    text = load_model_text(path)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    rows = []
    for messages in conversations():
        chat = [ChatMessage(message["role"], message["content"]) for message in messages]
        prompt = text.chat_template.render_token_ids(chat, text.tokenizer, add_generation_prompt=True)
        rows.append({"prompt_token_ids": prompt} | greedy(model, prompt, set(text.eos_token_ids)))
    REFERENCE_FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], eos_token_ids: set[int]) -> dict[str, list[float]]:
    """Return output ids, the end token included, and the gap of the top two logits at each."""
    output_token_ids: list[float] = []
    gaps: list[float] = []
    input_ids, cache = torch.tensor([prompt]), None
    while len(output_token_ids) < NUM_OUTPUT_TOKENS:
        result = model(input_ids, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        values, indices = result.logits[0, -1].topk(2)
        gaps.append(round(float(values[0] - values[1]), 6))
        output_token_ids.append(int(indices[0]))
        if output_token_ids[-1] in eos_token_ids:
            break
        input_ids = indices[:1].reshape(1, 1)
    return {"output_token_ids": output_token_ids, "gaps": gaps}


if __name__ == "__main__":
    main()
