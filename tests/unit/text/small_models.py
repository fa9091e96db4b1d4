"""Models made by hand, as small as they can be: files as a user would have them, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from libs.text.tokenizer_definition import TokenizerDefinition, TokenType

SPM_WORDS = ("▁t", "he", "▁the", "ll", "el", "▁h", "ello", "▁hello", "ld", "or", "▁w", "world")
SPM_CHARACTERS = ("▁", *"thelowrdaxy.", "<", ">", "s", "/", "<s")


def write_gguf(path: Path, *, tokenizer: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> Path:
    """Write a GGUF without tensors; ``tokenizer`` maps methods of GGUFWriter (without ``add_``) to values."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in tokenizer.items():
        getattr(writer, f"add_{name}")(value)
    for key, text in (keys or {}).items():
        writer.add_string(key, text)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sentencepiece_keys(**changes: Any) -> dict[str, Any]:
    """Return the tokenizer of a Llama-2-like model with a vocabulary of a few words and all bytes."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    normal = [*SPM_WORDS, *SPM_CHARACTERS]
    keys: dict[str, Any] = {
        "tokenizer_model": "llama",
        "tokenizer_pre": "default",
        "token_list": ["<unk>", "<s>", "</s>", *byte_tokens, *normal],
        "token_scores": [0.0] * 259 + [-float(rank) for rank in range(len(normal))],
        "token_types": [2, 3, 3] + [6] * 256 + [1] * len(normal),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    }
    return keys | changes


def byte_level_keys(**changes: Any) -> dict[str, Any]:
    """Return the tokenizer of a GPT-2-like model with three control tokens and a few merges."""
    letters = [chr(code) for code in (*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2"]
    merged = [merge.replace(" ", "") for merge in merges]
    keys: dict[str, Any] = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_list": ["<|start|>", "<|end|>", "<think>", *letters, *merged],
        "token_types": [3, 3, 4] + [1] * (len(letters) + len(merged)),
        "token_merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return keys | changes


def tokenizer_json(definition: TokenizerDefinition) -> dict[str, Any]:
    """Write a BPE tokenizer in the schema of tokenizer.json."""
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [
            added(
                token.token_id,
                token.text,
                special=token.is_special,
                lstrip=token.strips_left,
                rstrip=token.strips_right,
            )
            for token in definition.added_tokens
        ],
        "normalizer": definition.pipeline.normalizer,
        "pre_tokenizer": definition.pipeline.pre_tokenizer,
        "post_processor": None,
        "decoder": definition.pipeline.decoder,
        "model": {
            "type": "BPE",
            "unk_token": definition.unknown_text,
            "fuse_unk": definition.fuses_unknown,
            "byte_fallback": definition.has_byte_fallback,
            "ignore_merges": definition.ignores_merges,
            "vocab": {text: token_id for token_id, text in enumerate(definition.token_texts)},
            "merges": [" ".join(merge) for merge in definition.merges],
        },
    }


def write_folder(path: Path, tokenizer: Mapping[str, Any], **files: Any) -> Path:
    """Write a model folder; ``files`` maps names without ``.json`` to their contents."""
    path.mkdir(parents=True, exist_ok=True)
    contents = {"config": {"max_position_embeddings": 512}, **files, "tokenizer": tokenizer}
    for name, content in contents.items():
        (path / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return path


def added(token_id: int, text: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    """Return an entry for ``added_tokens`` of tokenizer.json."""
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False} | flags
    return {"id": token_id, "content": text, "special": special, **entry}


def control_ids(token_ids: Sequence[int], definition: TokenizerDefinition) -> list[int]:
    """Return the ids among ``token_ids`` that are control tokens."""
    return [token_id for token_id in token_ids if definition.token_types[token_id] == TokenType.CONTROL]
