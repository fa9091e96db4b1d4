"""The shape of answers and chunks."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from services.gateway.generation import FinishReason
from services.gateway.openai_answers import AnswerHead, ChatChunks, UsageCounts, completion_body

HEAD = AnswerHead("chatcmpl-1", 1700000000, "tiny")
COUNTS = UsageCounts(num_prompt_tokens=5, num_completion_tokens=7, num_cached_tokens=4)


def data_of(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    value: dict[str, Any] = orjson.loads(event[len(b"data: ") :])
    return value


@pytest.mark.parametrize("text", ["Hi", 'a "quoted"\nline\u2028', "\x00mark\x00", "😀", " "])
def test_a_content_chunk_holds_any_text(text: str) -> None:
    chunk = data_of(ChatChunks(HEAD, includes_usage=False).content(text))

    assert chunk == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }


def test_an_event_is_one_line() -> None:
    event = ChatChunks(HEAD, includes_usage=False).content("a\r\nb\n\nc")

    assert event.count(b"\n") == 2
    assert b"\r" not in event


def test_no_text_is_no_chunk() -> None:
    assert ChatChunks(HEAD, includes_usage=False).content("") == b""


def test_the_role_comes_with_an_empty_text_and_the_reason_without() -> None:
    chunks = ChatChunks(HEAD, includes_usage=False)

    assert data_of(chunks.role())["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    last = data_of(chunks.finish(FinishReason.LENGTH))["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "length")


def test_usage_is_in_one_chunk_without_choices_and_null_in_all_others() -> None:
    chunks = ChatChunks(HEAD, includes_usage=True)

    assert data_of(chunks.content("x"))["usage"] is None
    assert data_of(chunks.role())["usage"] is None
    usage = data_of(chunks.usage(COUNTS))
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_usage_is_left_out_unless_asked_for() -> None:
    chunks = ChatChunks(HEAD, includes_usage=False)

    assert chunks.usage(COUNTS) == b""
    assert "usage" not in data_of(chunks.content("x"))


def test_a_whole_answer_has_the_message_and_the_usage() -> None:
    body = orjson.loads(completion_body(HEAD, text="Hi", reason=FinishReason.STOP, usage=COUNTS))

    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "Hi"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == 12


def test_an_unknown_cached_count_is_left_out_rather_than_guessed() -> None:
    assert "prompt_tokens_details" not in UsageCounts(5, 7, None).as_json()
