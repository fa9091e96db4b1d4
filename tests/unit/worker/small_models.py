"""Llama models with random weights, as small as they can be: folders as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 97
END_TOKEN_ID = 1


def random_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a model with two layers and grouped queries; weights are large enough to make logits differ."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": END_TOKEN_ID,
    }
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(values | changes)))
    model.eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.25)
    return model


def save_model(model: LlamaForCausalLM, folder: Path, **save_options: Any) -> Path:
    """Write config, weights and a tokenizer of one word for each id."""
    model.save_pretrained(folder, **save_options)
    words = {f"w{token_id}": token_id for token_id in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1")  # type: ignore[no-untyped-call]
    saved.save_pretrained(folder)
    return folder


def expected_logits(model: LlamaForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits of every position, ``[num_tokens, vocab_size]``."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
