"""Anthropic's answers: messages, the events of a streamed one, and errors. Owns their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from libs.errors import OctavoError, spec_of
from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.client_call import Framing
from services.gateway.event_template import ChunkTemplate
from services.gateway.generation import FinishReason
from services.gateway.http_errors import ErrorShape, error_body, known_error
from services.gateway.sse import named_event
from services.gateway.text_preparation import PreparedPrompt

_ERROR_TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIRST_SERVER_STATUS: Final = 500


def error_shape(request_id: str | None) -> ErrorShape:
    """Return how an error of a request is told."""

    def shape(error: OctavoError) -> dict[str, Any]:
        status = spec_of(error).http_status
        usual = "api_error" if status >= _FIRST_SERVER_STATUS else "invalid_request_error"
        body = {
            "type": "error",
            "error": {"type": _ERROR_TYPES.get(status, usual), "message": error.message},
        }
        return body if request_id is None else body | {"request_id": request_id}

    return shape


def _error_event(error: OctavoError) -> bytes:
    return named_event("error", error_body(known_error(error), error_shape(None)))


_PING: Final = named_event("ping", b'{"type":"ping"}')
# A stream ends with message_stop and nothing behind it.
_FRAMING: Final = Framing(ping=_PING, done=b"", error_event=_error_event)


class MessageFormat:
    """One message."""

    includes_usage = True
    framing = _FRAMING

    def __init__(self, head: AnswerHead, prompt: PreparedPrompt) -> None:
        self._head = head
        self._prompt = prompt
        self._delta_template: ChunkTemplate | None = None
        self._stop: dict[str, Any] = {}

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the beginning of the message with the first delta, its text, and the end of its only block."""
        content = delta.content
        data = b""
        if self._delta_template is None:
            self._delta_template = ChunkTemplate(_text_delta, name="content_block_delta")
            data += self._begin()
        if content.text:
            data += self._delta_template.event_of(content.text)
        if content.finish_reason is not None:
            self._stop = _stop(content.finish_reason, content.stop_string)
            data += _event({"type": "content_block_stop", "index": 0})
        return data

    def text_template(self, choice_index: int) -> ChunkTemplate | None:
        """Return the event of a next text."""
        return self._delta_template

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return the events that end the message."""
        return _event({"type": "message_delta", "delta": self._stop, "usage": _usage(counts)}) + _event(
            {"type": "message_stop"}
        )

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Return the whole message."""
        (choice,) = choices
        assert choice.finish_reason is not None, "an answer has an end"
        content = [{"type": "text", "text": choice.text}]
        stop = _stop(choice.finish_reason, choice.stop_string)
        return orjson.dumps(self._message(content, stop, counts))

    def _begin(self) -> bytes:
        # What of the prompt comes from the cache is told at the end.
        counts = UsageCounts(len(self._prompt.token_ids), 0, None)
        no_stop = {"stop_reason": None, "stop_sequence": None}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        start = {"type": "message_start", "message": self._message([], no_stop, counts)}
        return _event(start) + _event(block) + _PING

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any], counts: UsageCounts) -> dict[str, Any]:
        return {
            "id": self._head.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **stop,
            "usage": _usage(counts),
        }


def _usage(counts: UsageCounts) -> dict[str, int]:
    """Return the counts; Anthropic's input tokens are those that did not come from the cache."""
    num_cached = counts.num_cached_tokens or 0
    return {
        "input_tokens": counts.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": counts.num_completion_tokens,
    }


def _stop(reason: FinishReason, stop_string: str | None) -> dict[str, Any]:
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    is_cut = reason is FinishReason.LENGTH
    return {"stop_reason": "max_tokens" if is_cut else "end_turn", "stop_sequence": None}


def _text_delta(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


def _event(payload: dict[str, Any]) -> bytes:
    return named_event(payload["type"], orjson.dumps(payload))
