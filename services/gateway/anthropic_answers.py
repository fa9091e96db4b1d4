"""Anthropic's answers: messages, the events of a streamed one, and errors. Owns their shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import orjson

from libs.errors import OctavoError, spec_of
from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeCall, WholeChoice, new_call_id
from services.gateway.client_call import Framing
from services.gateway.event_template import ChunkTemplate
from services.gateway.generation import FinishReason
from services.gateway.http_errors import ErrorShape, error_body, known_error
from services.gateway.model_formats.parsed import CallDelta, in_order
from services.gateway.partial_json import complete_object
from services.gateway.sse import named_event
from services.gateway.text_preparation import PreparedPrompt

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIRST_SERVER_STATUS: Final = 500
_OTHER_CLIENT_ERROR, _OTHER_SERVER_ERROR = "invalid_request_error", "api_error"
ERROR_TYPES: Final = (*_ERROR_TYPES.values(), _OTHER_CLIENT_ERROR, _OTHER_SERVER_ERROR)


def error_shape(request_id: str | None) -> ErrorShape:
    """Return how an error of a request is told."""

    def shape(error: OctavoError) -> dict[str, Any]:
        status = spec_of(error).http_status
        usual = _OTHER_SERVER_ERROR if status >= _FIRST_SERVER_STATUS else _OTHER_CLIENT_ERROR
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
    """One message: a block for its reasoning, for each text and for each call of a tool, in their order."""

    includes_usage = True
    framing = _FRAMING

    def __init__(self, head: AnswerHead, prompt: PreparedPrompt) -> None:
        self._head = head
        self._prompt = prompt
        self._is_begun = False
        self._num_blocks = 0
        # The kind of block that is open.
        self._kind: str | None = None
        self._text_template: ChunkTemplate | None = None
        self._stop: dict[str, Any] = {}

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the beginning of the message with the first delta, what came of its blocks, and their end."""
        content = delta.content
        data = b"" if self._is_begun else self._begin()
        if content.reasoning:
            data += self._open({"type": "thinking", "thinking": "", "signature": ""})
            data += self._block_delta({"type": "thinking_delta", "thinking": content.reasoning})
        for part in in_order(content.text, content.calls):
            data += self._text_events(part) if isinstance(part, str) else self._call_events(part)
        if content.finish_reason is not None:
            self._stop = _stop(content.finish_reason, content.stop_string, content.num_calls)
            if not self._num_blocks:
                data += self._open({"type": "text", "text": ""})
            data += self._close()
        return data

    def text_template(self, choice_index: int) -> ChunkTemplate | None:
        """Return the event of a next text while a block of text is open."""
        return self._text_template if self._kind == "text" else None

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return the events that end the message."""
        return _event({"type": "message_delta", "delta": self._stop, "usage": _usage(counts)}) + _event(
            {"type": "message_stop"}
        )

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Return the whole message."""
        (choice,) = choices
        assert choice.finish_reason is not None, "an answer has an end"
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        call_numbers = itertools.count()
        for part in in_order(choice.text, choice.calls):
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append(self._tool_use(next(call_numbers), part))
        if not content:
            content.append({"type": "text", "text": ""})
        stop = _stop(choice.finish_reason, choice.stop_string, len(choice.calls))
        return orjson.dumps(self._message(content, stop, counts))

    def _text_events(self, text: str) -> bytes:
        data = self._open({"type": "text", "text": ""})
        if self._text_template is None:
            self._text_template = ChunkTemplate(self._text_delta, name="content_block_delta")
        return data + self._text_template.event_of(text)

    def _call_events(self, call: CallDelta) -> bytes:
        if call.name is None:
            return self._block_delta({"type": "input_json_delta", "partial_json": call.arguments})
        block = {"type": "tool_use", "id": self._call_id(call.call_index), "name": call.name, "input": {}}
        return self._open(block, is_new=True)

    def _tool_use(self, index: int, call: WholeCall) -> dict[str, Any]:
        # An input is an object also where the answer was cut: what of it is certain. It is given as it was written,
        # as in a stream: numbers keep all their digits.
        written = orjson.Fragment(complete_object(call.arguments))
        return {"type": "tool_use", "id": self._call_id(index), "name": call.name, "input": written}

    def _call_id(self, index: int) -> str:
        return new_call_id(self._head, 0, index, prefix="toolu_")

    def _begin(self) -> bytes:
        self._is_begun = True
        # What of the prompt comes from the cache is told at the end.
        counts = UsageCounts(len(self._prompt.token_ids), 0, None)
        no_stop = {"stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": self._message([], no_stop, counts)})

    def _open(self, block: dict[str, Any], *, is_new: bool = False) -> bytes:
        """Begin a block, unless one of its kind is open and goes on."""
        if self._kind == block["type"] and not is_new:
            return b""
        data = self._close()
        is_first = self._num_blocks == 0
        self._kind, self._text_template = block["type"], None
        self._num_blocks += 1
        data += _event({"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block})
        return data + (_PING if is_first else b"")

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})

    def _text_delta(self, text: str) -> dict[str, Any]:
        delta = {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

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


def _stop(reason: FinishReason, stop_string: str | None, num_calls: int) -> dict[str, Any]:
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    if reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if num_calls else "end_turn", "stop_sequence": None}


def _event(payload: dict[str, Any]) -> bytes:
    return named_event(payload["type"], orjson.dumps(payload))
