"""Files of models that somebody made to do harm, or that a download left broken: refused in a sentence, soon."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from libs.errors import ModelLoadFailed
from libs.text import load_model_text

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}
FLAGS = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def added(token_id: Any, content: Any) -> list[dict[str, Any]]:
    return [{"id": token_id, "content": content, **FLAGS}]


def write_folder(
    path: Path,
    *,
    model: Mapping[str, Any] | None = None,
    config: Any = None,
    tokenizer_config: Any = None,
    generation_config: Any = None,
    **parts: Any,
) -> Path:
    tokenizer = copy.deepcopy(TOKENIZER) | parts
    if model is not None:
        tokenizer["model"] |= model
    files = {
        "tokenizer.json": tokenizer,
        "config.json": {"max_position_embeddings": 100} if config is None else config,
        "tokenizer_config.json": tokenizer_config or {},
        "generation_config.json": generation_config or {},
    }
    for name, value in files.items():
        (path / name).write_text(json.dumps(value))
    return path


def test_the_folder_itself_is_good(tmp_path: Path) -> None:
    assert load_model_text(write_folder(tmp_path)).tokenizer.vocab_size == 3


@pytest.mark.parametrize(
    "parts",
    [
        # Room for each id up to the highest would be 32 GB, and the library panics.
        {"model": {"vocab": {"a": 0, "b": 4_000_000_000}}},
        {"model": {"vocab": {"a": 10**12}}},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": "x"}}},
        {"model": {"vocab": {"a": 1.5}}},
        {"model": {"vocab": [["a"], ["b", 1, 2]]}},
        {"model": {"merges": [["a", "b", "c"]]}},
        {"model": {"merges": ["ab"]}},
        {"model": {"merges": [1]}},
        {"added_tokens": added(4_000_000_000, "x")},
        {"added_tokens": added(3, "x" * 5000)},
        {"added_tokens": added(3, "")},
        {"added_tokens": [{"id": 1}]},
        {"added_tokens": ["x"]},
        {"tokenizer_config": {"chat_template": 5}},
        {"generation_config": {"eos_token_id": -5}},
        {"generation_config": {"eos_token_id": 10**12}},
        {"generation_config": {"eos_token_id": "x"}},
        {"generation_config": {"eos_token_id": {"a": 1}}},
        {"generation_config": {"eos_token_id": [[1]]}},
        {"config": {"max_position_embeddings": True}},
        {"config": {"max_position_embeddings": 2**40}},
        {"config": {"text_config": [1]}},
    ],
)
def test_a_folder_that_no_model_could_have_is_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadFailed):
        load_model_text(write_folder(tmp_path, **parts))


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")

    with pytest.raises(ModelLoadFailed, match=r"chat_template\.jinja"):
        load_model_text(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.gguf"])
def test_a_file_that_git_left_behind_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1\n")

    with pytest.raises(ModelLoadFailed, match=f"{name} is a pointer of Git LFS.*git lfs pull"):
        load_model_text(folder / name if name.endswith(".gguf") else folder)


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def array(kind: int, items: list[bytes]) -> tuple[int, bytes]:
    return ARRAY, struct.pack("<IQ", kind, len(items)) + b"".join(items)


def integer(value: int) -> tuple[int, bytes]:
    return UINT64, struct.pack("<Q", value)


def negative(value: int) -> tuple[int, bytes]:
    return INT32, struct.pack("<i", value)


UINT8, INT32, FLOAT32, TEXT, ARRAY, UINT64 = 0, 5, 6, 8, 9, 10
GGUF: dict[str, tuple[int, bytes]] = {
    "general.architecture": (TEXT, text("llama")),
    "llama.context_length": integer(100),
    "tokenizer.ggml.model": (TEXT, text("gpt2")),
    "tokenizer.ggml.pre": (TEXT, text("gpt-2")),
    "tokenizer.ggml.tokens": array(TEXT, [text(one) for one in ("<unk>", "<|im_end|>", "a", "b", "ab")]),
    "tokenizer.ggml.token_type": array(INT32, [struct.pack("<i", one) for one in (2, 3, 1, 1, 1)]),
    "tokenizer.ggml.merges": array(TEXT, [text("a b")]),
    "tokenizer.ggml.eos_token_id": integer(1),
}
# Tried at each of its three million places, a token would take minutes.
SENTENCEPIECE = {
    "tokenizer.ggml.model": (TEXT, text("llama")),
    "tokenizer.ggml.scores": array(FLOAT32, [struct.pack("<f", 0)] * 5),
    "tokenizer.ggml.tokens": array(TEXT, [text(one) for one in ("<unk>", "</s>", "x" * 3_000_000, "b", "ab")]),
}


def gguf(changed: Mapping[str, tuple[int, bytes]], num_keys: int | None = None) -> bytes:
    values = {**GGUF, **changed}
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values) if num_keys is None else num_keys)
    return head + b"".join(text(key) + struct.pack("<I", kind) + raw for key, (kind, raw) in values.items())


def test_the_file_itself_is_good(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf({}))

    assert load_model_text(tmp_path / "model.gguf").tokenizer.vocab_size == 5


HOSTILE_FILES = {
    "keys": gguf({}, num_keys=2**63),
    "length of a text": gguf({"general.architecture": (TEXT, struct.pack("<Q", 2**64 - 1) + b"x")}),
    "no text": gguf({"general.architecture": (TEXT, text(b"\xff\xfe"))}),
    "length of texts": gguf({"tokenizer.ggml.tokens": (ARRAY, struct.pack("<IQ", TEXT, 2**62))}),
    "length of bytes": gguf({"x": (ARRAY, struct.pack("<IQ", UINT8, 2**62))}),
    "arrays in arrays": gguf({"x": (ARRAY, struct.pack("<IQ", ARRAY, 3) + bytes(50))}),
    "context": gguf({"llama.context_length": integer(2**64 - 1)}),
    "negative context": gguf({"llama.context_length": negative(-5)}),
    "end token": gguf({"tokenizer.ggml.eot_token_id": integer(1000)}),
    "negative end token": gguf({"tokenizer.ggml.eot_token_id": negative(-1)}),
    "long control token": gguf({"tokenizer.ggml.tokens": array(TEXT, [text("<" + "x" * 3000)] * 5)}),
    "long token": gguf(SENTENCEPIECE),
}


@pytest.mark.parametrize("raw", HOSTILE_FILES.values(), ids=HOSTILE_FILES.keys())
def test_a_file_that_no_model_could_have_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(raw)

    with pytest.raises(ModelLoadFailed):
        load_model_text(tmp_path / "model.gguf")


@pytest.mark.parametrize("seed", range(100))
def test_bytes_that_have_changed_are_served_or_refused(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    raw = bytearray(gguf({}))
    for _ in range(source.randint(1, 6)):
        raw[source.randrange(4, len(raw))] = source.randrange(256)
    path = tmp_path / "model.gguf"
    path.write_bytes(raw[: source.choice((len(raw), source.randrange(len(raw))))])

    # Anything but a refusal in our own words is a fault.
    with suppress(ModelLoadFailed):
        load_model_text(path)
