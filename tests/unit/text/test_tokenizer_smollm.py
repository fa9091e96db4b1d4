"""SmolLM2's tokenizer from its GGUF file, against the ids of the original and against llama.cpp."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.errors import InvalidRequest
from libs.text import ModelText, Tokenizer
from tests.unit.text.recorded_texts import recorded_ids, smollm_texts

# Ids of the tokenizer that SmolLM2 was published with.
PUBLISHED = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces  and\ttabs\n": [216, 2701, 256, 5600, 216, 284, 197, 100, 7366, 198],
    "1234567890 + 3.14159": [33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 1232, 216, 35, 30, 33, 36, 33, 37, 41],
    "```python\nprint('hello')\n```": [3725, 5367, 198, 3272, 1305, 28120, 1465, 198, 3725],
    "😀🚀 emoji test 🎉": [10813, 242, 218, 10813, 244, 218, 649, 33777, 1028, 15107, 232, 227],
    "don't can't won't I'm you're": [12420, 982, 416, 982, 3763, 982, 339, 5248, 346, 2316],
    "<|im_start|>user\nどう?<|im_end|>\n": [1, 4093, 198, 7365, 119, 7365, 224, 47, 2, 198],
    "": [],
}


@pytest.fixture(scope="module")
def tokenizer(smollm: ModelText) -> Tokenizer:
    return smollm.tokenizer


@pytest.mark.parametrize("text", PUBLISHED)
def test_ids_are_those_of_the_published_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, allow_special=True) == PUBLISHED[text]


def test_each_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("in 2024, 7·10³ or ٣٤", allow_special=False)

    pieces = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in token_ids]
    assert [piece for piece in pieces if any(character in "0123456789" for character in piece)] == list("2024710")


def test_white_space_before_a_digit_is_cut_off_with_the_digit_gone(tokenizer: Tokenizer) -> None:
    # Digits are cut off first, so the two spaces end a piece and stay together. Without that cut the expression
    # would leave one space to the digit: [216, 216, 33].
    assert tokenizer.encode("  1", allow_special=False) == [256, 33]


@pytest.mark.parametrize(("name", "allow_special"), [("smollm", False), ("smollm_special", True)])
def test_same_ids_as_llama_cpp_for_mixed_text(tokenizer: Tokenizer, name: str, allow_special: bool) -> None:
    ours = [tokenizer.encode(text, allow_special=allow_special) for text in smollm_texts()]

    assert ours == recorded_ids(name)


def test_control_text_is_text_unless_allowed(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b<repo_name>"

    allowed = tokenizer.encode(text, allow_special=True)
    plain = tokenizer.encode(text, allow_special=False)

    assert [token_id for token_id in allowed if tokenizer.is_special(token_id)] == [2, 3]
    assert not any(tokenizer.is_special(token_id) for token_id in plain)
    assert b"".join(map(tokenizer.token_bytes, plain)).decode() == text


def test_special_tokens_are_the_seventeen_of_the_model(tokenizer: Tokenizer) -> None:
    special = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special(token_id)]

    assert special == list(range(17))
    assert [tokenizer.token_bytes(token_id) for token_id in (0, 1, 2)] == [
        b"<|endoftext|>",
        b"<|im_start|>",
        b"<|im_end|>",
    ]
    assert tokenizer.vocab_size == 49152


# The published vocabulary lacks a token for these bytes (control characters, and the first bytes of planes that
# Unicode has not assigned); every implementation drops them.
BYTES_WITHOUT_TOKEN = bytes([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2])


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=200))
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(smollm: ModelText, text: str) -> None:
    for allow_special in (False, True):
        token_ids = smollm.tokenizer.encode(text, allow_special=allow_special)
        encodable = text.encode().translate(None, delete=BYTES_WITHOUT_TOKEN)
        assert b"".join(map(smollm.tokenizer.token_bytes, token_ids)) == encodable


def test_an_id_that_no_token_has_stands_for_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert not tokenizer.is_special(tokenizer.vocab_size)


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff until here", "🎉\ud83c"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    for allow_special in (False, True):
        with pytest.raises(InvalidRequest, match=r"lone surrogate \(U\+D"):
            tokenizer.encode(text, allow_special=allow_special)


def test_threads_get_the_same_ids_as_one_caller_alone(tokenizer: Tokenizer) -> None:
    texts = [f"<|im_start|>user\nquestion {number} é🎉 " * 20 for number in range(64)]
    alone = [
        (tokenizer.encode(text, allow_special=True), tokenizer.encode(text, allow_special=False)) for text in texts
    ]
    start_together = threading.Barrier(8)

    def encode_all(_: int) -> list[tuple[list[int], list[int]]]:
        start_together.wait(timeout=30)
        return [
            (tokenizer.encode(text, allow_special=True), tokenizer.encode(text, allow_special=False))
            for text in texts
        ]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(encode_all, range(8)))

    assert all(result == alone for result in results)


@given(text=st.text(alphabet=" \t\n=-a<|im_end|>é😀", max_size=400) | st.text(max_size=80))
def test_a_text_never_has_fewer_tokens_than_is_said_beforehand(smollm: ModelText, text: str) -> None:
    tokenizer = smollm.tokenizer

    for allow_special in (False, True):
        assert len(tokenizer.encode(text, allow_special=allow_special)) >= tokenizer.min_num_tokens(text)
    assert tokenizer.min_num_tokens(text) >= len(text.encode()) / 81
