from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text import IncrementalDetokenizer, ModelText, Tokenizer

SPECIAL = range(17)


def streamed(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join([detokenizer.add(chunk) for chunk in chunks]) + detokenizer.flush()


@st.composite
def chunked(draw: st.DrawFn, token_ids: st.SearchStrategy[int]) -> tuple[list[int], list[list[int]]]:
    """Draw token ids and the same ids cut into calls."""
    ids = draw(st.lists(token_ids, max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    borders = [0, *cuts, len(ids)]
    return ids, [ids[start:end] for start, end in itertools.pairwise(borders)]


# Ids below 261 are drawn more often: most of them are single bytes, so that broken characters are common.
@given(drawn=chunked(st.one_of(st.integers(0, 49151), st.integers(120, 260), st.integers(0, 20))))
def test_any_cut_into_calls_gives_the_text_of_all_bytes_at_once(
    smollm: ModelText, drawn: tuple[list[int], list[list[int]]]
) -> None:
    token_ids, chunks = drawn
    tokenizer = smollm.tokenizer

    kept = [token_id for token_id in token_ids if token_id not in SPECIAL]
    assert streamed(tokenizer, chunks) == _all_at_once(tokenizer, kept)
    assert streamed(tokenizer, chunks, skip_special_tokens=False) == _all_at_once(tokenizer, token_ids)


@given(drawn=chunked(st.integers(3, 287)))
def test_byte_fallback_in_any_cut_gives_the_text_without_its_first_space(
    sentencepiece: ModelText, drawn: tuple[list[int], list[list[int]]]
) -> None:
    token_ids, chunks = drawn
    tokenizer = sentencepiece.tokenizer

    expected = b"".join(map(tokenizer.token_bytes, token_ids)).removeprefix(b" ").decode(errors="replace")
    assert streamed(tokenizer, chunks) == expected


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "🎉🚀 emoji",
        "👨‍👩‍👧‍👦 a family joined by ZWJ",
        "e\u0301 a\u0308\u0323 combining marks",
        "🏳️‍🌈 flag with a variation selector",
        "日本語 中文 한국어",
        "\ufdd0 a noncharacter and \ufffd itself",
    ],
)
def test_every_text_comes_back_token_by_token(smollm: ModelText, sentencepiece: ModelText, text: str) -> None:
    for tokenizer in (smollm.tokenizer, sentencepiece.tokenizer):
        token_ids = tokenizer.encode(text, allow_special=False)
        assert streamed(tokenizer, [[token_id] for token_id in token_ids]) == text


def test_no_piece_holds_half_a_character(smollm: ModelText) -> None:
    token_ids = smollm.tokenizer.encode("a👨‍👩‍👧é日", allow_special=False)
    detokenizer = IncrementalDetokenizer(smollm.tokenizer)

    pieces = [detokenizer.add([token_id]) for token_id in token_ids]

    assert "\ufffd" not in "".join(pieces)
    # 👨 takes three tokens here: nothing, nothing, the whole character.
    assert pieces[:4] == ["a", "", "", "👨"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_one_replacement_at_the_end(smollm: ModelText) -> None:
    whole = smollm.tokenizer.encode("🎉", allow_special=False)
    detokenizer = IncrementalDetokenizer(smollm.tokenizer)

    held = detokenizer.add(whole[:-1])

    assert (held, detokenizer.flush()) == ("", "\ufffd")


def test_bytes_of_no_character_are_replaced_one_for_each_maximal_part(sentencepiece: ModelText) -> None:
    tokenizer = sentencepiece.tokenizer
    id_of = {text: token_id for token_id, text in enumerate(tokenizer.definition.token_texts)}

    def text_of(*values: int) -> str:
        return streamed(tokenizer, [[id_of[f"<0x{value:02X}>"]] for value in values])

    assert text_of(0xF0, 0x9F, 0x8E, 0x41) == "\ufffdA"
    assert text_of(0x80, 0x80) == "\ufffd\ufffd"
    assert text_of(0xC3, 0xC3, 0xA9) == "\ufffdé"
    assert text_of(0xED, 0xA0, 0x80) == "\ufffd\ufffd\ufffd"


def test_special_tokens_are_left_out_or_shown(smollm: ModelText) -> None:
    token_ids = smollm.tokenizer.encode("a<|im_end|>b", allow_special=True)

    assert streamed(smollm.tokenizer, [token_ids]) == "ab"
    assert streamed(smollm.tokenizer, [token_ids], skip_special_tokens=False) == "a<|im_end|>b"


def test_a_skipped_special_token_does_not_break_the_character_around_it(smollm: ModelText) -> None:
    first, *rest = smollm.tokenizer.encode("🎉", allow_special=False)

    assert streamed(smollm.tokenizer, [[first], [2], rest]) == "🎉"


def test_only_the_first_space_of_the_text_is_dropped(sentencepiece: ModelText) -> None:
    tokenizer = sentencepiece.tokenizer
    id_of = {text: token_id for token_id, text in enumerate(tokenizer.definition.token_texts)}

    # The special token before the text is left out, so the space after it is still the first.
    assert streamed(tokenizer, [[1], [id_of["▁"]], [id_of["▁the"]], [id_of["▁hello"]]]) == " the hello"


def test_a_text_that_goes_on_keeps_its_first_space(sentencepiece: ModelText) -> None:
    tokenizer = sentencepiece.tokenizer
    token_ids = tokenizer.encode("hello", allow_special=False)

    begun, continued = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer, is_continued=True)

    assert begun.add(token_ids) == "hello"
    assert continued.add(token_ids) == " hello"


def _all_at_once(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, token_ids)).decode(errors="replace")
