"""OpenAI's answers to a chat completion: the whole one and the chunks of a streamed one, as bytes.

Owns their shape. Chunks are cut from templates made once for each request, because they are written for each
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.generation import FinishReason
from services.gateway.sse import event

_MARK = "\x00mark\x00"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of an answer repeats."""

    completion_id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Tokens of an answer; ``num_cached_tokens`` is None when the engine could not tell it any more."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int | None

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
        }
        if self.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        return usage


class ChatChunks:
    """The events of one streamed answer, without the ``[DONE]`` at its end."""

    def __init__(self, head: AnswerHead, *, includes_usage: bool) -> None:
        self._head = head
        self.includes_usage = includes_usage
        template = self._chunk([_choice({"content": _MARK}, None)], usage=None)
        self._before_text, self._after_text = event(orjson.dumps(template)).split(orjson.dumps(_MARK))

    def role(self) -> bytes:
        """Return the first event."""
        chunk = self._chunk([_choice({"role": "assistant", "content": ""}, None)], usage=None)
        return event(orjson.dumps(chunk))

    def content(self, text: str) -> bytes:
        """Return the event for some text; nothing for none."""
        if not text:
            return b""
        return self._before_text + orjson.dumps(text) + self._after_text

    def finish(self, reason: FinishReason) -> bytes:
        """Return the event that says why the answer ended."""
        return event(orjson.dumps(self._chunk([_choice({}, reason)], usage=None)))

    def usage(self, counts: UsageCounts) -> bytes:
        """Return the event with the counts; nothing unless the client asked for it."""
        if not self.includes_usage:
            return b""
        return event(orjson.dumps(self._chunk([], usage=counts.as_json())))

    def _chunk(self, choices: list[dict[str, Any]], *, usage: dict[str, Any] | None) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._head.completion_id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }
        # Clients that ask for usage find the field in every chunk, and null in all but one.
        return chunk | {"usage": usage} if self.includes_usage else chunk


def completion_body(head: AnswerHead, *, text: str, reason: FinishReason, usage: UsageCounts) -> bytes:
    """Return a whole answer."""
    return orjson.dumps(
        {
            "id": head.completion_id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": reason.value,
                }
            ],
            "usage": usage.as_json(),
        }
    )


def model_object(*, name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Return OpenAI's model object, with the model's context beside."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "octavo",
        "max_model_len": max_model_len,
    }


def _choice(delta: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
    return {
        "index": 0,
        "delta": delta,
        "logprobs": None,
        "finish_reason": None if reason is None else reason.value,
    }
