"""OpenAI's answers of the Responses API: the whole response and the numbered events of a streamed one.

Owns their shape. A response has one item, the assistant's message, of one part, its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from libs.errors import OctavoError, Overloaded
from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.client_call import Framing
from services.gateway.generation import FinishReason
from services.gateway.http_errors import known_error
from services.gateway.responses_schema import ResponseBody
from services.gateway.sse import PING, named_event

RESPONSE_ID_PREFIX: Final = "resp_"
_PLACE: Final = {"output_index": 0, "content_index": 0}


class ResponseFormat:
    """One response."""

    includes_usage = True

    def __init__(self, head: AnswerHead, body: ResponseBody) -> None:
        # A stream ends with its last event and nothing behind it.
        self.framing = Framing(ping=PING, done=b"", error_event=self._failure)
        self._head = head
        self._body = body
        self._item_id = f"msg_{head.answer_id.removeprefix(RESPONSE_ID_PREFIX)}"
        self._num_events = 0
        self._pieces: list[str] = []
        self._reason: FinishReason | None = None

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the beginning of the response with the first delta, its text, and the end of its only item."""
        content = delta.content
        data = b"" if self._num_events else self._begin()
        if content.text:
            self._pieces.append(content.text)
            data += self._part_event("response.output_text.delta", delta=content.text, logprobs=[])
        if content.finish_reason is not None:
            self._reason = content.finish_reason
            data += self._end_of_item("".join(self._pieces), content.finish_reason)
        return data

    def text_template(self, choice_index: int) -> None:
        """Return nothing: every event has its number."""

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return the event that ends the response."""
        assert self._reason is not None, "the counts come after the end"
        response = self._finished("".join(self._pieces), self._reason, counts)
        return self._event(f"response.{response['status']}", response=response)

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Return the whole response."""
        (choice,) = choices
        assert choice.finish_reason is not None, "an answer has an end"
        return orjson.dumps(self._finished(choice.text, choice.finish_reason, counts))

    def _begin(self) -> bytes:
        response = self._response("in_progress", [])
        item = self._item("in_progress", [])
        return b"".join(
            [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._part_event("response.content_part.added", part=_part("")),
            ]
        )

    def _end_of_item(self, text: str, reason: FinishReason) -> bytes:
        item = self._item(_status(reason), [_part(text)])
        return b"".join(
            [
                self._part_event("response.output_text.done", text=text, logprobs=[]),
                self._part_event("response.content_part.done", part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
            ]
        )

    def _failure(self, error: OctavoError) -> bytes:
        error = known_error(error)
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        message = error.message.encode(errors="replace").decode()
        response = self._response("failed", []) | {"error": {"code": code, "message": message}}
        return self._event("response.failed", response=response)

    def _finished(self, text: str, reason: FinishReason, counts: UsageCounts) -> dict[str, Any]:
        status = _status(reason)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, [self._item(status, [_part(text)])]) | {
            "incomplete_details": details,
            "usage": _usage(counts),
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self._body
        return {
            "id": self._head.answer_id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": output,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "metadata": asked.metadata or {},
            "user": asked.user,
            "safety_identifier": asked.safety_identifier,
            # What this server does for every request.
            "background": False,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, **_PLACE, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(kind, orjson.dumps(payload))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def _usage(counts: UsageCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": counts.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.num_prompt_tokens + counts.num_completion_tokens,
    }
