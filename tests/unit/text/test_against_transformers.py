"""SmolLM2's text side against transformers.

transformers converts the GGUF file into a byte-level pre-tokenizer alone; the published tokenizer, and llama.cpp,
cut off each digit before it. So ids must agree exactly where no white space stands before a digit (digits are in no
merge, which makes the cut invisible elsewhere), and where they differ transformers' conversion is the one that is
wrong: ``"  1"`` is [256, 33] in the published tokenizer and [216, 216, 33] in the conversion.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from libs.text import ChatMessage, IncrementalDetokenizer, ModelText
from tests.unit.text.recorded_texts import SMOLLM_PIECES

CONVERSATIONS = [
    [ChatMessage("user", "Name three primes.")],
    [ChatMessage("system", "Be brief."), ChatMessage("user", "Hi! 😀")],
    [ChatMessage("user", "a\n\n b"), ChatMessage("assistant", "c"), ChatMessage("user", "  d 1 2 3 ")],
]


@pytest.fixture(scope="module")
def transformers_tokenizer(smollm_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm_path.parent), gguf_file=smollm_path.name)


def test_ids_agree_where_no_white_space_stands_before_a_digit(
    smollm: ModelText, transformers_tokenizer: Any
) -> None:
    random_source = random.Random(7)
    texts = ["".join(random_source.choices(SMOLLM_PIECES, k=random_source.randint(1, 30))) for _ in range(600)]
    comparable = [text for text in texts if not re.search(r"\s[\d½٣]", text)]
    assert len(comparable) > 200

    for text in comparable:
        expected = transformers_tokenizer.encode(text, add_special_tokens=False)
        assert smollm.tokenizer.encode(text, allow_special=True) == expected, repr(text)


def test_any_ids_decode_to_the_same_text_broken_characters_included(
    smollm: ModelText, transformers_tokenizer: Any
) -> None:
    random_source = random.Random(8)
    byte_tokens = [i for i in range(smollm.tokenizer.vocab_size) if len(smollm.tokenizer.token_bytes(i)) == 1]

    for _ in range(300):
        token_ids = random_source.choices(byte_tokens, k=40) + random_source.choices(range(49152), k=10)
        random_source.shuffle(token_ids)
        for skips in (False, True):
            expected = transformers_tokenizer.decode(
                token_ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
            detokenizer = IncrementalDetokenizer(smollm.tokenizer, skip_special_tokens=skips)
            text = "".join(detokenizer.add([token_id]) for token_id in token_ids) + detokenizer.flush()
            assert text == expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_template_renders_the_same_text(
    smollm: ModelText, transformers_tokenizer: Any, messages: list[ChatMessage], add_generation_prompt: bool
) -> None:
    expected = transformers_tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )

    assert smollm.chat_template.render(messages, add_generation_prompt=add_generation_prompt) == expected


def test_named_tokens_are_the_same(smollm: ModelText, transformers_tokenizer: Any) -> None:
    assert dict(smollm.tokenizer.named_tokens.texts) == dict(transformers_tokenizer.special_tokens_map)
    assert transformers_tokenizer.bos_token_id == 1
    assert (transformers_tokenizer.eos_token_id,) == smollm.eos_token_ids
