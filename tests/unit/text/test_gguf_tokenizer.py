"""What a GGUF file's tokenizer keys mean, on hand-made byte-level vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libs.errors import ModelLoadFailed
from libs.text import ChatMessage, ModelText, load_model_text
from tests.unit.text.small_models import byte_level_keys, write_gguf


def load(path: Path, **changes: Any) -> ModelText:
    return load_model_text(write_gguf(path / "small.gguf", tokenizer=byte_level_keys(**changes)))


def pieces(model_text: ModelText, text: str) -> list[str]:
    token_ids = model_text.tokenizer.encode(text, allow_special=False)
    return [model_text.tokenizer.token_bytes(token_id).decode() for token_id in token_ids]


@pytest.mark.parametrize(
    ("pre_tokenizer", "expected"),
    [
        # "12" is a merge: only a pre-tokenizer that cuts digits apart keeps it from happening.
        ("gpt-2", ["hello", "12", "  "]),
        ("smollm", ["hello", "1", "2", "  "]),
        ("qwen2", ["hello", "1", "2", "  "]),
        ("llama-bpe", ["hello", "12", "  "]),
    ],
)
def test_each_known_pre_tokenizer_cuts_in_its_way(tmp_path: Path, pre_tokenizer: str, expected: list[str]) -> None:
    model_text = load(tmp_path, tokenizer_pre=pre_tokenizer)

    assert pieces(model_text, "hello12  ") == expected


def test_qwen_composes_characters_first(tmp_path: Path) -> None:
    model_text = load(tmp_path, tokenizer_pre="qwen2")

    decomposed = model_text.tokenizer.encode("e\u0301", allow_special=False)

    assert b"".join(map(model_text.tokenizer.token_bytes, decomposed)).decode() == "\u00e9"


def test_llama_3_takes_whole_words_of_the_vocabulary_and_begins_with_bos(tmp_path: Path) -> None:
    keys = byte_level_keys()
    tokens = [*keys["token_list"], "hey"]
    types = [*keys["token_types"], 1]

    llama = load(tmp_path, tokenizer_pre="llama-bpe", token_list=tokens, token_types=types)
    gpt2 = load(tmp_path, token_list=tokens, token_types=types)

    # No merge leads to "hey", so GPT-2's BPE cannot reach it.
    assert pieces(llama, "hey") == ["hey"]
    assert pieces(gpt2, "hey") == ["he", "y"]
    assert (llama.prompt_prefix_token_ids, gpt2.prompt_prefix_token_ids) == ((0,), ())


def test_the_file_may_say_whether_bos_is_added(tmp_path: Path) -> None:
    assert load(tmp_path, add_bos_token=True).prompt_prefix_token_ids == (0,)
    assert load(tmp_path, tokenizer_pre="llama-bpe", add_bos_token=False).prompt_prefix_token_ids == ()


def test_a_file_says_how_it_is_sampled_from(tmp_path: Path) -> None:
    # Keys that llama.cpp's converter makes of generation_config.json.
    said = byte_level_keys(sampling_temp=0.6, sampling_top_k=20, sampling_penalty_repeat=1.05)

    said_by_file = load_model_text(write_gguf(tmp_path / "said.gguf", tokenizer=said)).sampling_defaults

    assert said_by_file == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}


def test_a_file_may_have_a_template_for_requests_with_tools(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T{{ tools[0] }}"}
    path = write_gguf(tmp_path / "small.gguf", tokenizer=byte_level_keys(), keys=templates)

    template = load_model_text(path).chat_template

    assert template.source == "D\nT{{ tools[0] }}"
    assert template.render([ChatMessage("user", "hello")], add_generation_prompt=True) == "D"


def test_end_tokens_are_all_that_the_file_names_and_the_well_known_ends_of_a_turn(tmp_path: Path) -> None:
    keys = byte_level_keys()
    model_text = load(
        tmp_path,
        token_list=[*keys["token_list"], "<|im_end|>", "<|eot_id|>"],
        token_types=[*keys["token_types"], 3, 3],
        eot_token_id=0,
    )

    size = model_text.tokenizer.vocab_size
    assert model_text.eos_token_ids == (1, 0, size - 2, size - 1)


@pytest.mark.parametrize("kind", [1, 4])
def test_the_end_of_a_turn_is_a_control_token_whatever_the_file_says(tmp_path: Path, kind: int) -> None:
    # llama.cpp: "control-looking token was not control-type; this is probably a bug in the model".
    keys = byte_level_keys()
    model_text = load(
        tmp_path, token_list=[*keys["token_list"], "<|im_end|>"], token_types=[*keys["token_types"], kind]
    )

    tokenizer = model_text.tokenizer
    end_id = tokenizer.vocab_size - 1
    assert model_text.eos_token_ids == (1, end_id)
    assert tokenizer.is_special(end_id)
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [end_id]
    assert end_id not in tokenizer.encode("<|im_end|>", allow_special=False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer_pre": "tekken"}, "pre-tokenizer 'tekken'; supported are deepseek-r1-qwen, gpt-2, llama-bpe"),
        ({"tokenizer_model": "bert"}, "of the kind 'bert'; gpt2 and llama are supported"),
        ({"token_merges": ["he"]}, "malformed merge 'he'"),
        ({"token_merges": ["he llo"]}, "is broken"),
        ({"token_types": [1, 2]}, "no valid type for each token"),
        ({"eos_token_id": 99_999}, "outside of the vocabulary"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_a_way_out(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=sentence):
        load(tmp_path, **changes)


def test_user_defined_tokens_stand_for_their_text(byte_level: ModelText) -> None:
    token_ids = byte_level.tokenizer.encode("<think>hello", allow_special=False)

    assert token_ids[0] == 2
    assert byte_level.tokenizer.token_bytes(2) == b"<think>"
    assert not byte_level.tokenizer.is_special(2)
