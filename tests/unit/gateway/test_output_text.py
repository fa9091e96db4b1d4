"""From tokens to text: stop strings, whole characters, and the same text however tokens are cut into steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.text import ModelText
from services.gateway.generation import EngineUsage, FinishReason, GenerationFinished
from services.gateway.output_text import NoOutput, OutputText, new_output
from tests.unit.gateway.conftest import options

NO_USAGE = EngineUsage(0, 0, 0, 0, 0.0)


def finished(reason: FinishReason = FinishReason.STOP, stop_token_id: int | None = None) -> GenerationFinished:
    return GenerationFinished(reason, stop_token_id, NO_USAGE)


def read(
    model_text: ModelText, steps: Sequence[Sequence[int]], stop_strings: Sequence[str] = (), min_tokens: int = 0
) -> tuple[list[str], FinishReason | None, int]:
    """Feed steps, the end with the last; returns the pieces, why it ended, and the tokens to pay for."""
    output = OutputText(model_text.tokenizer, options(stop=list(stop_strings), min_tokens=min_tokens))
    pieces: list[str] = []
    taken: list[int] = []
    for index, step in enumerate(steps):
        delta = output.take(step, finished(FinishReason.LENGTH) if index == len(steps) - 1 else None)
        pieces.append(delta.text)
        taken += delta.token_ids
        assert len(taken) == output.num_tokens
        if delta.finish_reason is not None:
            return pieces, delta.finish_reason, output.num_tokens
    return pieces, None, output.num_tokens


def encode(model_text: ModelText, text: str) -> list[int]:
    return model_text.tokenizer.encode(text, allow_special=False)


def test_a_character_is_shown_when_it_is_whole(model_text: ModelText) -> None:
    token_ids = encode(model_text, "a 🦜 b")
    assert len(token_ids) > 4, "the emoji must be several tokens for this test"

    pieces, reason, num_tokens = read(model_text, [[token_id] for token_id in token_ids])

    assert "".join(pieces) == "a 🦜 b"
    assert not any("\ufffd" in piece for piece in pieces)
    assert reason is FinishReason.LENGTH
    assert num_tokens == len(token_ids)


def test_an_unfinished_character_at_the_end_is_replaced(model_text: ModelText) -> None:
    emoji = encode(model_text, "🦜")
    assert len(emoji) > 1

    pieces, _, _ = read(model_text, [emoji[:1]])

    assert "".join(pieces) == "\ufffd"


@pytest.mark.parametrize("stop_strings", [(), ("nowhere",)])
def test_the_token_that_ended_the_output_is_counted_and_not_shown(
    model_text: ModelText, stop_strings: tuple[str, ...]
) -> None:
    output = OutputText(model_text.tokenizer, options(stop=list(stop_strings)))
    token_ids = encode(model_text, "yes no")

    delta = output.take(token_ids, finished(stop_token_id=token_ids[-1]))

    assert delta.text == "yes"
    assert delta.finish_reason is FinishReason.STOP
    assert output.num_tokens == len(token_ids)


def test_a_stop_string_ends_the_text_before_it_and_the_count_with_its_token(model_text: ModelText) -> None:
    token_ids = encode(model_text, "one two three four")
    assert len(token_ids) == 4

    pieces, reason, num_tokens = read(model_text, [token_ids], stop_strings=[" three"])

    assert "".join(pieces) == "one two"
    assert reason is FinishReason.STOP
    assert num_tokens == 3


def test_nothing_of_a_stop_string_over_several_tokens_is_ever_shown(model_text: ModelText) -> None:
    token_ids = encode(model_text, "say <<END>> now")

    pieces, reason, _ = read(model_text, [[token_id] for token_id in token_ids], stop_strings=["<<END>>"])

    assert "".join(pieces) == "say "
    assert reason is FinishReason.STOP


def test_the_beginning_of_a_stop_string_is_shown_when_it_does_not_come(model_text: ModelText) -> None:
    token_ids = encode(model_text, "say <<EN")

    pieces, reason, _ = read(model_text, [[token_id] for token_id in token_ids], stop_strings=["<<END>>"])

    assert "".join(pieces) == "say <<EN"
    assert reason is FinishReason.LENGTH


def test_stop_strings_wait_for_the_minimum_of_tokens(model_text: ModelText) -> None:
    token_ids = encode(model_text, "one two one two one")

    pieces, reason, num_tokens = read(model_text, [token_ids], stop_strings=[" two"], min_tokens=3)

    assert "".join(pieces) == "one two one"
    assert reason is FinishReason.STOP
    assert num_tokens == 4


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_cut_into_steps_gives_the_same_text_end_and_count(model_text: ModelText, data: st.DataObject) -> None:
    text = data.draw(st.text(alphabet="ab<|E> \n😀é中", max_size=40))
    token_ids = encode(model_text, text) or [1]
    stop_strings = data.draw(st.lists(st.text(alphabet="ab<|E> 😀", min_size=1, max_size=4), max_size=3))
    min_tokens = data.draw(st.integers(0, 3))
    steps: list[list[int]] = []
    rest = list(token_ids)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        steps.append(rest[:size])
        rest = rest[size:]

    pieces, reason, num_tokens = read(model_text, steps, stop_strings, min_tokens)

    whole, whole_reason, whole_num_tokens = read(model_text, [token_ids], stop_strings, min_tokens)
    assert ("".join(pieces), reason, num_tokens) == ("".join(whole), whole_reason, whole_num_tokens)
    if min_tokens == 0:
        assert not any(stop_string in "".join(pieces) for stop_string in stop_strings)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_end_without_tokens_passes_its_reason_on(model_text: ModelText, reason: FinishReason) -> None:
    output = OutputText(model_text.tokenizer, options(stop="x"))

    delta = output.take([], finished(reason))

    assert (delta.text, delta.finish_reason, output.num_tokens) == ("", reason, 0)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_stop_string_is_shown_where_it_is_asked_for(model_text: ModelText, is_streamed: bool) -> None:
    token_ids = encode(model_text, "one two three four")
    output = OutputText(model_text.tokenizer, options(stop=" three", include_stop_str_in_output=True))

    steps = [[token_id] for token_id in token_ids] if is_streamed else [token_ids]
    deltas = []
    for step in steps:
        deltas.append(output.take(step, None))
        if deltas[-1].finish_reason is not None:
            break

    assert "".join(delta.text for delta in deltas) == "one two three"
    assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids[:3]
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_the_end_token_is_shown_where_stops_and_special_tokens_are_asked_for(model_text: ModelText) -> None:
    token_ids = [*encode(model_text, "yes"), 2]

    def text_of(**fields: object) -> str:
        return OutputText(model_text.tokenizer, options(**fields)).take(token_ids, finished(stop_token_id=2)).text

    assert text_of() == "yes"
    assert text_of(include_stop_str_in_output=True) == "yes"
    assert text_of(skip_special_tokens=False) == "yes"
    assert text_of(include_stop_str_in_output=True, skip_special_tokens=False) == "yes<|im_end|>"


def test_special_tokens_within_the_text_are_shown_where_they_are_asked_for(model_text: ModelText) -> None:
    token_ids = [*encode(model_text, "a"), 1, *encode(model_text, "b")]

    hidden = OutputText(model_text.tokenizer, options()).take(token_ids, None).text
    shown = OutputText(model_text.tokenizer, options(skip_special_tokens=False)).take(token_ids, None).text

    assert (hidden, shown) == ("ab", "a<|im_start|>b")


def test_without_any_output_wanted_nothing_is_shown_or_counted(model_text: ModelText) -> None:
    output = new_output(model_text.tokenizer, options(max_tokens=0), is_continued=False)

    delta = output.take([5], None)

    assert isinstance(output, NoOutput)
    assert (delta.text, list(delta.token_ids), delta.finish_reason) == ("", [], FinishReason.LENGTH)
    assert output.num_tokens == 0


IM_START = 1


@pytest.mark.parametrize("tokens_per_step", [1, 9])
@pytest.mark.parametrize(
    ("fields", "text", "num_tokens"),
    [
        ({}, "one<", 3),
        ({"include_stop_str_in_output": True}, "one<<|im_start|>", 3),
        ({"skip_special_tokens": False}, "one<", 3),
        ({"min_tokens": 4, "max_tokens": 9}, "one< two", 5),
    ],
)
def test_a_stop_string_that_is_a_control_token_ends_the_text_also_where_such_tokens_are_not_shown(
    model_text: ModelText, fields: dict[str, object], text: str, num_tokens: int, tokens_per_step: int
) -> None:
    """LostRuins/koboldcpp#791: what is not rendered was never found. What else was held back is shown."""
    one, less, two = (encode(model_text, word) for word in ("one", "<", " two"))
    token_ids = [*one, *less, IM_START, *two, IM_START, IM_START]
    output = OutputText(model_text.tokenizer, options(stop=["<|im_start|>", "<END>"], **fields))

    deltas = []
    for start in range(0, len(token_ids), tokens_per_step):
        deltas.append(output.take(token_ids[start : start + tokens_per_step], None))
        if deltas[-1].finish_reason is not None:
            break

    assert "".join(delta.text for delta in deltas) == text
    assert (deltas[-1].finish_reason, deltas[-1].stop_string) == (FinishReason.STOP, "<|im_start|>")
    assert sum(len(delta.token_ids) for delta in deltas) == output.num_tokens == num_tokens
