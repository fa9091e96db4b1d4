"""Models with random weights, as small as they can be: folders as a user would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 97
END_TOKEN_ID = 1


# Windows are shorter than the prompts of tests, and heads are not the hidden size's equal parts.
WINDOW = 21
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama with biases": (LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "mistral without window": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {"num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2 with windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {}),
    "qwen3 with biases": (Qwen3Config, {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": True,
        },
    ),
}


def random_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a model with grouped queries; weights are large enough to make logits differ."""
    config_class, of_family = FAMILIES[family]
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
    if config_class is not LlamaConfig:
        values["head_dim"] = 16
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config_class(**(values | of_family | changes))
    )
    model.eval()  # type: ignore[no-untyped-call]
    mean_of_norms = 0.0 if config_class is Gemma3TextConfig else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean_of_norms if "norm" in name else 0.0, 0.1 if "norm" in name else 0.25)
    return model


def random_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a Llama model with two layers."""
    model = random_model("llama", **changes)
    assert isinstance(model, LlamaForCausalLM)
    return model


def save_model(model: PreTrainedModel, folder: Path, **save_options: Any) -> Path:
    """Write config, weights and a tokenizer of one word for each id."""
    model.save_pretrained(folder, **save_options)
    words = {f"w{token_id}": token_id for token_id in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1")  # type: ignore[no-untyped-call]
    saved.save_pretrained(folder)
    return folder


def expected_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits of every position, ``[num_tokens, vocab_size]``."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
