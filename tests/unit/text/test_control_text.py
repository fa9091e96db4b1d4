from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.control_text import BREAK, ControlText, ControlTokenAt, PlainText
from libs.text.tokenizer_definition import AddedToken


def control(*texts: str, **flags: bool) -> ControlText:
    return ControlText(
        [AddedToken(token_id=index, text=text, is_special=True, **flags) for index, text in enumerate(texts)]
    )


CHAT = control("<|im_start|>", "<|im_end|>", "<|im|>", "</s>")


def test_template_tokens_are_split_off_and_the_clients_stay_text() -> None:
    content = CHAT.protect("x<|im_end|>y")

    sections = list(CHAT.split(f"<|im_start|>{content}<|im_end|>"))

    assert sections == [ControlTokenAt(0), PlainText("x<|im_end|>y"), ControlTokenAt(1)]


def test_strings_are_protected_wherever_they_are() -> None:
    value = {"a": ["</s>", {"</s>": "fine"}], "n": 3, "none": None}

    protected = CHAT.protect(value)

    assert CHAT.has_risk(value)
    assert "</s>" not in repr(protected)
    assert repr(protected).replace(repr(BREAK)[1:-1], "") == repr(value)


@pytest.mark.parametrize("text", ["", "plain", "a < b", "<|IM_END|>", "im_end|>", "<|im_end|"[1:], "x</p>"])
def test_harmless_text_is_left_as_it_is(text: str) -> None:
    assert not CHAT.has_risk([{"content": text}])
    assert CHAT.protect(text) == text


@pytest.mark.parametrize("end", ["<", "<|", "<|im_", "<|im_end|", "</", "</s"])
def test_the_beginning_of_a_control_token_at_the_end_is_a_risk(end: str) -> None:
    assert CHAT.has_risk("text" + end)

    rest = {"<": "/s>", "<|": "im|>", "<|im_": "end|>", "<|im_end|": ">", "</": "s>", "</s": ">"}[end]
    joined = "".join([CHAT.protect("text" + end), CHAT.protect(rest)])
    assert list(CHAT.split(joined)) == [PlainText("text" + end + rest)]


def test_marks_of_the_client_are_removed() -> None:
    assert CHAT.has_risk(f"a{BREAK}b")
    assert CHAT.protect(f"<|im{BREAK}_end|>") == f"<{BREAK}|im_end|>"


@pytest.mark.parametrize(
    ("texts", "content"),
    [
        (("<s>", "s>"), "<s>"),
        (("aba",), "ababababa"),
        (("aa",), "aaaaa"),
        (("ab", "bc", "abc"), "abcab"),
        (("x",), "x"),
        (("x", "xx"), "axxx"),
        (("[I]", "[I"), "[I][I"),
    ],
)
def test_overlapping_and_nested_control_texts_are_all_broken(texts: tuple[str, ...], content: str) -> None:
    guard = control(*texts)

    assert list(guard.split(guard.protect(content))) == [PlainText(content)]


@given(
    texts=st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), min_size=1, max_size=5, unique=True),
    contents=st.lists(st.text(alphabet="ab<" + BREAK, max_size=12), max_size=4),
)
def test_nothing_protected_ever_holds_a_control_token_alone_or_joined(
    texts: list[str], contents: list[str]
) -> None:
    guard = control(*texts)

    joined = "".join(map(guard.protect, contents))

    visible = "".join(contents).replace(BREAK, "")
    assert list(guard.split(joined)) == ([PlainText(visible)] if visible else [])


@given(
    texts=st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), min_size=1, max_size=6, unique=True),
    rendered=st.text(alphabet="ab<|", max_size=30),
)
def test_splitting_finds_the_leftmost_longest_control_token(texts: list[str], rendered: str) -> None:
    longest_first = sorted(texts, key=len, reverse=True)
    expected = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", rendered)

    sections = list(control(*texts).split(rendered))

    as_texts = [texts[s.token_id] if isinstance(s, ControlTokenAt) else s.text for s in sections]
    assert as_texts == [part for part in expected if part]
    assert [isinstance(s, ControlTokenAt) for s in sections] == [
        index % 2 == 1 for index, part in enumerate(expected) if part
    ]


def test_white_space_goes_with_the_token_that_takes_it() -> None:
    both = control("<s>", strips_left=True, strips_right=True)

    assert list(both.split("a \n<s>\t <s> b")) == [
        PlainText("a"),
        ControlTokenAt(0),
        ControlTokenAt(0),
        PlainText("b"),
    ]


def test_a_single_word_token_is_not_found_within_a_word() -> None:
    word = control("END", is_single_word=True)

    assert list(word.split("ENDED END")) == [PlainText("ENDED "), ControlTokenAt(0)]


def test_without_control_tokens_all_is_text() -> None:
    none = control()

    assert not none.has_risk("<|im_end|>")
    assert list(none.split("<|im_end|>")) == [PlainText("<|im_end|>")]
