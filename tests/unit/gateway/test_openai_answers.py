"""The shape of answers and chunks to a conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from libs.text import load_model_text, resolve_model_path
from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.generation import FinishReason
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.openai_answers import ChatFormat
from services.gateway.output_text import TextDelta
from services.gateway.text_preparation import PreparedPrompt
from tests.unit.gateway.conftest import MODEL_NAME, options

HEAD = AnswerHead("chatcmpl-1", 1700000000, "tiny")
COUNTS = UsageCounts(num_prompt_tokens=5, num_completion_tokens=7, num_cached_tokens=4)
PROMPT = PreparedPrompt([1, 2, 3, 4, 5], [])
SHAPES = LogprobShapes(load_model_text(resolve_model_path(MODEL_NAME)).tokenizer)
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def chat_format(echoed_text: str = "", **fields: Any) -> ChatFormat:
    return ChatFormat(HEAD, options(**fields), replace(PROMPT, echoed_text=echoed_text), SHAPES)


def delta(
    text: str, *, index: int = 0, token_ids: tuple[int, ...] = (9,), reason: FinishReason | None = None
) -> ChoiceDelta:
    return ChoiceDelta(index, TextDelta(text, token_ids, reason))


def chunks_of(events: bytes) -> list[dict[str, Any]]:
    assert events.endswith(b"\n\n") or not events
    blocks = events.split(b"\n\n")[:-1]
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    return [orjson.loads(block[len(b"data: ") :]) for block in blocks]


@pytest.mark.parametrize("text", ["Hi", 'a "quoted"\nline\u2028', "\x00mark\x00", "😀", " ", "a\r\nb\n\nc"])
def test_the_role_comes_first_and_a_content_chunk_holds_any_text(text: str) -> None:
    role, content = chunks_of(chat_format().events(delta(text)))

    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }


def test_no_text_is_no_chunk() -> None:
    answer = chat_format()
    answer.events(delta("a"))

    assert answer.events(delta("")) == b""


def test_the_reason_comes_in_a_chunk_of_its_own() -> None:
    *_, last = chunks_of(chat_format().events(delta("a", reason=FinishReason.LENGTH)))

    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")


def test_every_choice_has_a_role_texts_and_a_reason_under_its_index() -> None:
    answer = chat_format(n=2)
    events = b"".join(
        [
            answer.events(delta("a", index=1)),
            answer.events(delta("b", index=0)),
            answer.events(delta("c", index=1, reason=FinishReason.STOP)),
            answer.events(delta("", index=0, reason=FinishReason.LENGTH)),
        ]
    )

    found = [
        (c["choices"][0]["index"], c["choices"][0]["delta"], c["choices"][0]["finish_reason"])
        for c in chunks_of(events)
    ]
    role = {"role": "assistant", "content": ""}
    assert found == [
        (1, role, None),
        (1, {"content": "a"}, None),
        (0, role, None),
        (0, {"content": "b"}, None),
        (1, {"content": "c"}, None),
        (1, {}, "stop"),
        (0, {}, "length"),
    ]


def test_usage_is_in_one_chunk_without_choices_and_null_in_all_others() -> None:
    answer = chat_format(**WITH_USAGE)

    assert [chunk["usage"] for chunk in chunks_of(answer.events(delta("x", reason=FinishReason.STOP)))] == [
        None
    ] * 3
    (usage,) = chunks_of(answer.usage_event(COUNTS))
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_continuous_usage_counts_all_choices_as_they_come() -> None:
    fields: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    answer = chat_format(n=2, **fields)
    events = answer.events(delta("x", token_ids=(7, 8))) + answer.events(delta("y", index=1, token_ids=(9,)))

    counts = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks_of(events)]
    assert counts == [(5, 0), (5, 2), (5, 2), (5, 3)]


def test_usage_is_left_out_unless_asked_for() -> None:
    answer = chat_format()

    assert not answer.includes_usage
    assert not any("usage" in chunk for chunk in chunks_of(answer.events(delta("x"))))


def test_token_ids_come_with_their_text_and_the_prompts_with_the_first_chunk() -> None:
    answer = chat_format(return_token_ids=True)
    role, part, rest = chunks_of(
        answer.events(delta("", token_ids=(7,))) + answer.events(delta("é", token_ids=(8,)))
    )

    assert role["prompt_token_ids"] == PROMPT.token_ids
    # A part of a character is no text yet, but its token has come.
    assert (part["choices"][0]["delta"], part["choices"][0]["token_ids"]) == ({"content": ""}, [7])
    assert (rest["choices"][0]["delta"], rest["choices"][0]["token_ids"]) == ({"content": "é"}, [8])


def test_an_echoed_message_is_the_first_text_of_each_choice() -> None:
    answer = chat_format("Sure: ", n=2)
    events = answer.events(delta("a")) + answer.events(delta("b", index=1))

    texts = [(c["choices"][0]["index"], c["choices"][0]["delta"]["content"]) for c in chunks_of(events)]
    assert texts == [(0, ""), (0, "Sure: "), (0, "a"), (1, ""), (1, "Sure: "), (1, "b")]


def test_a_whole_answer_has_the_messages_and_the_usage() -> None:
    choices = [
        WholeChoice(["H", "i"], [7, 8], FinishReason.STOP),
        WholeChoice(["Yo"], [9], FinishReason.LENGTH),
    ]

    body = orjson.loads(chat_format(n=2).body(choices, COUNTS))

    assert body["object"] == "chat.completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["Hi", "Yo"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert body["usage"]["total_tokens"] == 12
    assert "token_ids" not in body["choices"][0]
    assert "prompt_token_ids" not in body


def test_a_whole_answer_has_token_ids_where_they_are_asked_for() -> None:
    body = orjson.loads(
        chat_format("Sure: ", return_token_ids=True).body([WholeChoice(["x"], [7], FinishReason.STOP)], COUNTS)
    )

    assert body["prompt_token_ids"] == PROMPT.token_ids
    assert body["choices"][0]["token_ids"] == [7]
    assert body["choices"][0]["message"]["content"] == "Sure: x"


def test_an_unknown_cached_count_is_left_out_rather_than_guessed() -> None:
    assert "prompt_tokens_details" not in UsageCounts(5, 7, None).as_json()
