"""OpenAI's answers of the Responses API: the whole response and the numbered events of a streamed one.

Owns their shape. The output has an item for the reasoning, one for each text and one for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from libs.errors import OctavoError, Overloaded
from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice, new_call_id
from services.gateway.client_call import Framing
from services.gateway.generation import FinishReason
from services.gateway.http_errors import known_error
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.model_formats.parsed import CallDelta, in_order
from services.gateway.responses_schema import FunctionTool, ResponseBody
from services.gateway.sse import PING, named_event

RESPONSE_ID_PREFIX: Final = "resp_"


class ResponseFormat:
    """One response: an item for its reasoning, for each text and for each call of a function, in their order."""

    includes_usage = True

    def __init__(self, head: AnswerHead, body: ResponseBody, shapes: LogprobShapes) -> None:
        # A stream ends with its last event and nothing behind it.
        self.framing = Framing(ping=PING, done=b"", error_event=self._failure)
        self._head = head
        self._body = body
        self._shapes = shapes
        self._id = head.answer_id.removeprefix(RESPONSE_ID_PREFIX)
        self._num_events = 0
        self._done: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._reason: FinishReason | None = None
        # Log-probabilities of tokens whose text has not come yet, and how many belonged to reasoning.
        self._logprobs: list[dict[str, Any]] = []
        self._num_reasoning_logprobs = 0

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the beginning of the response with the first delta, what came of its items, and their end."""
        content = delta.content
        data = b"" if self._num_events else self._begin()
        self._take_logprobs(delta)
        if content.reasoning:
            data += self._text_delta("reasoning", content.reasoning, [])
        for part in in_order(content.text, content.calls):
            if isinstance(part, str):
                data += self._text_delta("message", part, self._taken_logprobs())
            else:
                data += self._call_delta(part)
        if content.finish_reason is not None:
            self._reason = content.finish_reason
            if self._open is None and not self._done:
                data += self._begin_item("message", _message_item(self._message_id(0), [], "in_progress"))
            data += self._end_item(_status(content.finish_reason))
        return data

    def text_template(self, choice_index: int) -> None:
        """Return nothing: every event has its number."""

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return the event that ends the response."""
        assert self._reason is not None, "the counts come after the end"
        response = self._finished(self._done, self._reason, counts)
        return self._event(f"response.{response['status']}", response=response)

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Return the whole response."""
        (choice,) = choices
        assert choice.finish_reason is not None, "an answer has an end"
        return msgspec.json.encode(self._finished(self._whole_items(choice), choice.finish_reason, counts))

    def _whole_items(self, choice: WholeChoice) -> list[dict[str, Any]]:
        """Return the items of a whole answer; where it was cut the last is incomplete."""
        assert choice.finish_reason is not None, "an answer has an end"
        items: list[dict[str, Any]] = []
        if choice.reasoning:
            items.append(_reasoning_item(self._reasoning_id, choice.reasoning, "completed"))
        num_calls = num_messages = 0
        # A message has the log-probabilities of all tokens since the one before it.
        num_told = choice.num_reasoning_tokens
        for part in in_order(choice.text, choice.calls):
            if isinstance(part, str):
                is_last = num_calls == len(choice.calls)
                end = len(choice.token_ids) if is_last else choice.calls[num_calls].num_tokens_before
                content = [_text_part(part, self._logprobs_of(choice, num_told, end))]
                items.append(_message_item(self._message_id(num_messages), content, "completed"))
                num_told, num_messages = max(num_told, end), num_messages + 1
            else:
                items.append(self._call_item(num_calls, part.name, part.arguments, "completed"))
                num_calls += 1
        if not items:
            content = [_text_part("", self._logprobs_of(choice, num_told, len(choice.token_ids)))]
            items.append(_message_item(self._message_id(0), content, "completed"))
        items[-1]["status"] = _status(choice.finish_reason)
        return items

    def _logprobs_of(self, choice: WholeChoice, start: int, end: int) -> list[dict[str, Any]]:
        """Return the entries of some of a choice's tokens, where they are wanted."""
        if not self._body.wants_logprobs:
            return []
        return self._shapes.chat_content(choice.token_ids[start:end], choice.logprobs[start:end])

    def _begin(self) -> bytes:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _take_logprobs(self, delta: ChoiceDelta) -> None:
        if not self._body.wants_logprobs:
            return
        self._logprobs += self._shapes.chat_content(delta.content.token_ids, delta.logprobs)
        num_more = delta.content.num_reasoning_tokens - self._num_reasoning_logprobs
        del self._logprobs[:num_more]
        self._num_reasoning_logprobs += num_more

    def _taken_logprobs(self) -> list[dict[str, Any]]:
        logprobs, self._logprobs = self._logprobs, []
        return logprobs

    def _text_delta(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        data = b""
        if self._open is None or self._open.kind != kind:
            data += self._end_item("completed")
            if kind == "message":
                num_messages = sum(item["type"] == "message" for item in self._done)
                item = _message_item(self._message_id(num_messages), [], "in_progress")
            else:
                item = _reasoning_item(self._reasoning_id, None, "in_progress")
            data += self._begin_item(kind, item)
        assert self._open is not None, "an item has been begun"
        self._open.pieces.append(text)
        self._open.logprobs += logprobs
        if kind == "reasoning":
            return data + self._part_event("response.reasoning_text.delta", delta=text)
        return data + self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _call_delta(self, call: CallDelta) -> bytes:
        if call.name is not None:
            item = self._call_item(call.call_index, call.name, "", "in_progress")
            return self._end_item("completed") + self._begin_item("function_call", item)
        assert self._open is not None, "arguments follow the name"
        self._open.pieces.append(call.arguments)
        return self._item_event("response.function_call_arguments.delta", delta=call.arguments)

    def _begin_item(self, kind: str, item: dict[str, Any]) -> bytes:
        self._open = _OpenItem(kind, item, [], [])
        data = self._event("response.output_item.added", output_index=len(self._done), item=item)
        if kind == "function_call":
            return data
        part = _text_part("", []) if kind == "message" else _reasoning_part("")
        return data + self._part_event("response.content_part.added", part=part)

    def _end_item(self, status: str) -> bytes:
        """End the item that is open, if one is."""
        if self._open is None:
            return b""
        kind, item, text = self._open.kind, self._open.item, "".join(self._open.pieces)
        if kind == "function_call":
            item = item | {"arguments": text, "status": status}
            data = self._item_event("response.function_call_arguments.done", name=item["name"], arguments=text)
        elif kind == "message":
            logprobs = self._open.logprobs + self._taken_logprobs()
            part = _text_part(text, logprobs)
            item = _message_item(item["id"], [part], status)
            data = self._part_event("response.output_text.done", text=text, logprobs=logprobs)
            data += self._part_event("response.content_part.done", part=part)
        else:
            item = _reasoning_item(item["id"], text, status)
            data = self._part_event("response.reasoning_text.done", text=text)
            data += self._part_event("response.content_part.done", part=_reasoning_part(text))
        data += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None
        return data

    def _failure(self, error: OctavoError) -> bytes:
        error = known_error(error)
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        message = error.message.encode(errors="replace").decode()
        response = self._response("failed", []) | {"error": {"code": code, "message": message}}
        return self._event("response.failed", response=response)

    def _finished(self, output: list[dict[str, Any]], reason: FinishReason, counts: UsageCounts) -> dict[str, Any]:
        status = _status(reason)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, output) | {"incomplete_details": details, "usage": _usage(counts)}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        asked = self._body
        effort = None if asked.reasoning is None else asked.reasoning.effort
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
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "text": {"format": _asked_form(asked)},
            "tool_choice": ("auto" if asked.tools else "none") if asked.tool_choice is None else asked.tool_choice,
            "tools": [_asked_tool(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            # What this server does for every request.
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
        }

    @property
    def _reasoning_id(self) -> str:
        return f"rs_{self._id}"

    def _message_id(self, number: int) -> str:
        """Return the id of a message; of several in one response only the first has no number."""
        return f"msg_{self._id}_{number}" if number else f"msg_{self._id}"

    def _call_item(self, index: int, name: str, arguments: str, status: str) -> dict[str, Any]:
        return {
            "id": new_call_id(self._head, 0, index, prefix="fc_"),
            "type": "function_call",
            "status": status,
            "call_id": new_call_id(self._head, 0, index, prefix="call_"),
            "name": name,
            "arguments": arguments,
        }

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None, "events of an item come while it is open"
        return self._event(kind, item_id=self._open.item["id"], output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        # What a client sent is repeated, and may have integers of any size.
        return named_event(kind, msgspec.json.encode(payload))


@dataclass(slots=True)
class _OpenItem:
    """The item that is written: as it was begun, and what came of it."""

    kind: str
    item: dict[str, Any]
    pieces: list[str]
    logprobs: list[dict[str, Any]]


def _asked_form(asked: ResponseBody) -> Any:
    form = None if asked.text is None else asked.text.format
    return {"type": "text"} if form is None else msgspec.to_builtins(form)


def _asked_tool(tool: FunctionTool) -> dict[str, Any]:
    """Return a tool as it was sent, with what OpenAI's clients expect of it."""
    return {"type": "function", "strict": True} | {
        name: value
        for name, value in msgspec.structs.asdict(tool).items()
        if value is not None or name == "parameters"
    }


def _message_item(item_id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _reasoning_item(item_id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_reasoning_part(text)]
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": content}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


def _usage(counts: UsageCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": counts.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.num_reasoning_tokens or 0},
        "total_tokens": counts.num_prompt_tokens + counts.num_completion_tokens,
    }
