"""OpenAI's answers to a chat completion: the whole one and the chunks of a streamed one, as bytes.

Owns their shape. Chunks are cut from templates made once for each choice, because they are written for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice, new_call_id
from services.gateway.chunks import RunningUsage
from services.gateway.event_template import ChunkTemplate
from services.gateway.generation import FinishReason, TokenLogprob
from services.gateway.generation_options import GenerationOptions
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.model_formats.parsed import CallDelta
from services.gateway.sse import OPENAI_FRAMING, event
from services.gateway.text_preparation import PreparedPrompt


class ChatFormat:
    """One answer to a conversation."""

    framing = OPENAI_FRAMING

    def __init__(
        self,
        head: AnswerHead,
        options: GenerationOptions,
        prompt: PreparedPrompt,
        shapes: LogprobShapes,
    ) -> None:
        self._head = head
        self._options = options
        self._prompt = prompt
        self._shapes = shapes
        self._usage = RunningUsage(len(prompt.token_ids), options)
        self._templates: dict[int, ChunkTemplate] = {}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self._options.includes_usage

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the role with a choice's first delta, its text, and why it ended."""
        index, content = delta.choice_index, delta.content
        data = b""
        if index not in self._templates:
            data += self._begin(index)
        self._usage.add(len(content.token_ids))
        if content.reasoning:
            data += event(orjson.dumps(self._chunk(index, {"reasoning_content": content.reasoning}, None)))
        if content.token_ids and (self._options.returns_token_ids or self._options.num_logprobs is not None):
            data += self._content_with_tokens(delta)
        else:
            data += self._content(index, content.text)
        for call in content.calls:
            data += event(orjson.dumps(self._chunk(index, {"tool_calls": [self._call_delta(index, call)]}, None)))
        if content.finish_reason is not None:
            reason = _reason(content.finish_reason, content.num_calls)
            data += event(orjson.dumps(self._chunk(index, {}, reason)))
        return data

    def text_template(self, choice_index: int) -> ChunkTemplate | None:
        """Return the event of a next text where text is all that a chunk says."""
        is_plain = self._usage.is_constant and not self._options.returns_token_ids
        return self._templates.get(choice_index) if is_plain else None

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return the event with the counts."""
        return event(orjson.dumps(self._frame([]) | {"usage": counts.as_json()}))

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Return a whole answer."""
        body: dict[str, Any] = {
            "id": self._head.answer_id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": counts.as_json(),
        }
        if self._options.returns_token_ids:
            body["prompt_token_ids"] = self._prompt.token_ids
        if self._options.num_prompt_logprobs is not None:
            body["prompt_logprobs"] = self._shapes.prompt_field(
                self._prompt.token_ids, choices[0].prompt_logprobs, self._options.num_prompt_logprobs
            )
        return orjson.dumps(body)

    def _content(self, index: int, text: str) -> bytes:
        """Return the event for text; nothing for none."""
        if not text:
            return b""
        if self._usage.is_constant:
            return self._templates[index].event_of(text)
        return event(orjson.dumps(self._chunk(index, {"content": text}, None)))

    def _content_with_tokens(self, delta: ChoiceDelta) -> bytes:
        """Return the event for tokens of which more is wanted than their text; they may have none yet."""
        token_ids = delta.content.token_ids
        more: dict[str, Any] = {"logprobs": self._logprobs(token_ids, delta.logprobs)}
        if self._options.returns_token_ids:
            more["token_ids"] = list(token_ids)
        return event(orjson.dumps(self._chunk(delta.choice_index, {"content": delta.content.text}, None, more)))

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._options.num_logprobs is None:
            return None
        return {"content": self._shapes.chat_content(token_ids, logprobs), "refusal": None}

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        content, reasoning = self._prompt.echoed_text + choice.text, choice.reasoning
        calls = [
            {"id": self._call_id(index, number)} | _function(call.name, call.arguments)
            for number, call in enumerate(choice.calls)
        ]
        has_more = bool(calls or reasoning)
        message = {"role": "assistant", "content": content if content or not has_more else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        body: dict[str, Any] = {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": None if choice.finish_reason is None else _reason(choice.finish_reason, len(calls)),
        }
        return body | {"token_ids": choice.token_ids} if self._options.returns_token_ids else body

    def _call_delta(self, choice_index: int, delta: CallDelta) -> dict[str, Any]:
        """Return a part of a call: id and name with the first."""
        if delta.name is None:
            return {"index": delta.call_index, "function": {"arguments": delta.arguments}}
        head = {"index": delta.call_index, "id": self._call_id(choice_index, delta.call_index)}
        return head | _function(delta.name, delta.arguments)

    def _call_id(self, choice_index: int, call_index: int) -> str:
        """Return an id that no other call of any answer has."""
        return new_call_id(self._head, choice_index, call_index, prefix="call_")

    def _begin(self, index: int) -> bytes:
        """Return a choice's first events and make the template of the others."""
        self._templates[index] = ChunkTemplate(lambda text: self._chunk(index, {"content": text}, None))
        first = self._chunk(index, {"role": "assistant", "content": ""}, None)
        if self._options.returns_token_ids:
            first["prompt_token_ids"] = self._prompt.token_ids
        data = event(orjson.dumps(first))
        return data + self._content(index, self._prompt.echoed_text)

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None, more: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._frame([choice | (more or {})])

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.answer_id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        } | self._usage.fields


def _function(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _reason(reason: FinishReason, num_calls: int) -> str:
    return "tool_calls" if reason is FinishReason.STOP and num_calls else reason.value
