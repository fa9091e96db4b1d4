"""Write a GGUF model as a folder that other servers and clients read: bf16 weights, configuration and tokenizer.

``python -m scripts.export_model FOLDER`` writes the embedded model. A benchmark's client needs the tokenizer, and
another server that is measured beside Octavo needs the same weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from libs.text import EMBEDDED_MODEL_NAME, load_model_text, resolve_model_path
from libs.text.gguf_header import read_gguf_header
from services.worker.weight_files import open_weights
from services.worker.weights import LLAMA, ModelConfig

_FILE_OF_WEIGHTS = "model.safetensors"


def main() -> None:
    """Write the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=EMBEDDED_MODEL_NAME, help="as --model of the worker; a GGUF file")
    options = parser.parse_args()
    export_model(resolve_model_path(options.model), options.folder)


def export_model(path: Path, folder: Path) -> Path:
    """Write the GGUF model at ``path`` to ``folder`` unless it is there, and return the folder.

    Raises:
        ModelLoadFailed: when the model cannot be read.
    """
    if (folder / _FILE_OF_WEIGHTS).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_text(path, folder)
    source = open_weights(path)
    (folder / "config.json").write_text(json.dumps(_config_of(path, source.config), indent=1))
    tensors = {name: source.read(name).to(torch.bfloat16).contiguous() for name in source.sizes_bytes}
    # Last and at once: the file says that all is there.
    unfinished = folder / f"{_FILE_OF_WEIGHTS}.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / _FILE_OF_WEIGHTS)
    return folder


def _write_text(path: Path, folder: Path) -> None:
    tokenizer = load_model_text(path).tokenizer
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": read_gguf_header(path).string("tokenizer.chat_template"),
        **tokenizer.named_tokens.texts,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _config_of(path: Path, config: ModelConfig) -> dict[str, object]:
    if config.architecture != LLAMA or config.rope_scaling is not None:
        raise SystemExit(f"{path} is not a plain Llama model, which is all that is exported.")
    eos_token_ids = load_model_text(path).eos_token_ids
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        # The same for readers that know the newer name alone.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.has_tied_embeddings,
        "max_position_embeddings": config.max_position,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": list(eos_token_ids),
        "bos_token_id": None,
    }


if __name__ == "__main__":
    main()
