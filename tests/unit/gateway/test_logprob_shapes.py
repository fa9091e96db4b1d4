"""Log-probabilities in the shapes that clients know, with exact bytes."""

from __future__ import annotations

import math

import pytest

from libs.text import ModelText
from services.gateway.generation import TokenLogprob
from services.gateway.logprob_shapes import LogprobShapes, joined


@pytest.fixture
def shapes(model_text: ModelText) -> LogprobShapes:
    return LogprobShapes(model_text.tokenizer)


def encode(model_text: ModelText, text: str) -> list[int]:
    return model_text.tokenizer.encode(text, allow_special=False)


def test_a_chat_entry_has_token_bytes_and_alternatives(shapes: LogprobShapes, model_text: ModelText) -> None:
    (hi,), (yo,) = encode(model_text, "hi"), encode(model_text, " a")

    (entry,) = shapes.chat_content([hi], [TokenLogprob(-0.5, 2, ((yo, -0.25), (hi, -0.5)))])

    assert entry == {
        "token": "hi",
        "logprob": -0.5,
        "bytes": [104, 105],
        "top_logprobs": [
            {"token": " a", "logprob": -0.25, "bytes": [32, 97]},
            {"token": "hi", "logprob": -0.5, "bytes": [104, 105]},
        ],
    }


def test_the_bytes_of_parts_of_a_character_join_to_it(shapes: LogprobShapes, model_text: ModelText) -> None:
    token_ids = encode(model_text, "🦜")
    assert len(token_ids) > 1

    entries = shapes.chat_content(token_ids, [TokenLogprob(-1.0, 1, ())] * len(token_ids))

    assert bytes(value for entry in entries for value in entry["bytes"]).decode() == "🦜"
    assert all("\ufffd" in entry["token"] for entry in entries)


def test_parts_of_a_character_have_names_that_differ(shapes: LogprobShapes, model_text: ModelText) -> None:
    first, second, *_ = encode(model_text, "🦜")

    part = shapes.text_part([first], [TokenLogprob(-1.0, 2, ((second, -0.5),))], [0], num_alternatives=1)

    token_bytes = model_text.tokenizer.token_bytes
    names = [
        "bytes:" + "".join(f"\\x{value:02x}" for value in token_bytes(token_id)) for token_id in (first, second)
    ]
    assert part["tokens"] == names[:1]
    assert part["top_logprobs"] == [{names[1]: -0.5, names[0]: -1.0}]


def test_a_text_part_has_lists_of_one_length_and_null_where_nothing_is_known(
    shapes: LogprobShapes, model_text: ModelText
) -> None:
    a, b = (encode(model_text, text)[0] for text in ("a", "b"))
    entry = TokenLogprob(-0.75, 1, ((b, -0.75), (a, -1.5)))

    part = shapes.text_part([a, b], [None, entry], [0, 1], num_alternatives=1)

    assert part == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -0.75],
        "tokens": ["a", "b"],
        "top_logprobs": [None, {"b": -0.75}],
    }
    assert joined([part, part])["tokens"] == ["a", "b", "a", "b"]


def test_the_token_itself_is_always_among_its_alternatives(shapes: LogprobShapes, model_text: ModelText) -> None:
    a, b = (encode(model_text, text)[0] for text in ("a", "b"))

    def alternatives(count: int) -> object:
        entry = TokenLogprob(-3.0, 5, ((b, -0.5),))
        return shapes.text_part([a], [entry], [0], num_alternatives=count)["top_logprobs"]

    assert alternatives(1) == [{"b": -0.5, "a": -3.0}]
    assert alternatives(0) == [{"a": -3.0}]


def test_prompt_tokens_are_named_by_id(shapes: LogprobShapes, model_text: ModelText) -> None:
    a, b = (encode(model_text, text)[0] for text in ("a", "b"))

    field = shapes.prompt_field([a, b], [TokenLogprob(-3.0, 5, ((a, -0.5), (b, -3.0)))], 1)

    assert field == [
        None,
        {
            str(b): {"logprob": -3.0, "rank": 5, "decoded_token": "b"},
            str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
    assert shapes.prompt_field([a], [], 1) == [None]


def test_json_has_no_infinity(shapes: LogprobShapes, model_text: ModelText) -> None:
    (a,) = encode(model_text, "a")

    (entry,) = shapes.chat_content([a], [TokenLogprob(-math.inf, 9, ())])

    assert entry["logprob"] == -9999.0
