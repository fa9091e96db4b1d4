"""A tokenizer like Llama 2's, from a hand-made GGUF with a few words and all bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.errors import ModelLoadFailed
from libs.text import ModelText, load_model_text
from libs.text.gguf_tokenizer import merges_by_score
from tests.unit.text.recorded_texts import recorded_ids, sentencepiece_texts
from tests.unit.text.small_models import sentencepiece_keys, write_gguf


def test_words_are_merged_by_score_and_rare_characters_become_bytes(sentencepiece: ModelText) -> None:
    tokenizer = sentencepiece.tokenizer

    token_ids = tokenizer.encode("hello the é", allow_special=False)

    texts = [tokenizer.definition.token_texts[token_id] for token_id in token_ids]
    # "▁h" + "ello" joins to "▁hello" only where nothing with a better score takes the "h": here "he" does.
    assert texts == ["▁", "he", "ll", "o", "▁the", "▁", "<0xC3>", "<0xA9>"]


def test_same_ids_as_llama_cpp(sentencepiece: ModelText) -> None:
    ours = [sentencepiece.tokenizer.encode(text, allow_special=False) for text in sentencepiece_texts()]

    assert ours == recorded_ids("sentencepiece")


def test_merges_never_make_a_control_token_from_plain_text(sentencepiece: ModelText) -> None:
    tokenizer = sentencepiece.tokenizer

    plain = tokenizer.encode("<s>", allow_special=False)
    allowed = tokenizer.encode("<s>", allow_special=True)

    # "<s" and ">" are tokens, so their merge would be "<s>", which is control.
    assert ("<s", ">") not in merges_by_score(tokenizer.definition)
    assert ("<", "s") in merges_by_score(tokenizer.definition)
    assert not any(map(tokenizer.is_special, plain))
    assert b"".join(map(tokenizer.token_bytes, plain)) == b" <s>"
    assert allowed == [1]


def test_token_bytes_are_raw_bytes(sentencepiece: ModelText) -> None:
    tokenizer = sentencepiece.tokenizer
    id_of = {text: token_id for token_id, text in enumerate(tokenizer.definition.token_texts)}

    assert tokenizer.token_bytes(id_of["▁hello"]) == b" hello"
    assert [tokenizer.token_bytes(id_of[f"<0x{byte:02X}>"]) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert tokenizer.token_bytes(id_of["</s>"]) == b"</s>"


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=60))
def test_bytes_of_the_tokens_are_the_text_behind_one_space(sentencepiece: ModelText, text: str) -> None:
    token_ids = sentencepiece.tokenizer.encode(text, allow_special=False)

    assert b"".join(map(sentencepiece.tokenizer.token_bytes, token_ids)) == (b" " + text.encode() if text else b"")


def test_prompt_prefix_and_end_come_from_the_file(sentencepiece: ModelText) -> None:
    assert sentencepiece.prompt_prefix_token_ids == (1,)
    assert sentencepiece.eos_token_ids == (2,)
    assert sentencepiece.max_model_len == 512


def test_without_space_prefix_nothing_is_put_before_the_text(tmp_path: Path) -> None:
    keys = sentencepiece_keys(add_space_prefix=False, add_bos_token=False)

    model_text = load_model_text(write_gguf(tmp_path / "gemma-like.gguf", tokenizer=keys))

    token_ids = model_text.tokenizer.encode("the world", allow_special=False)
    assert b"".join(map(model_text.tokenizer.token_bytes, token_ids)) == b"the world"
    assert model_text.prompt_prefix_token_ids == ()


def test_user_defined_tokens_are_found_in_plain_text_and_are_not_special(tmp_path: Path) -> None:
    keys = sentencepiece_keys()
    keys["token_list"] = [*keys["token_list"], "\n\n", "<b>"]
    keys["token_scores"] = [*keys["token_scores"], -1000.0, -1000.0]
    keys["token_types"] = [*keys["token_types"], 4, 4]
    tokenizer = load_model_text(write_gguf(tmp_path / "user.gguf", tokenizer=keys)).tokenizer

    token_ids = tokenizer.encode("\n\n<b>", allow_special=False)

    assert token_ids == [tokenizer.vocab_size - 2, tokenizer.vocab_size - 1]
    assert not any(map(tokenizer.is_special, token_ids))


@pytest.mark.parametrize("broken", [{"token_scores": [0.0]}, {"token_types": [1]}, {"token_types": [9] * 288}])
def test_incomplete_vocabularies_are_refused(tmp_path: Path, broken: dict[str, list[float]]) -> None:
    path = write_gguf(tmp_path / "broken.gguf", tokenizer=sentencepiece_keys(**broken))

    with pytest.raises(ModelLoadFailed, match=r"broken\.gguf has no"):
        load_model_text(path)
