"""OpenAI's answers to a chat completion: the whole one and the chunks of a streamed one, as bytes.

Owns their shape. Chunks are cut from templates made once for each choice, because they are written for each token.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.chunks import RunningUsage
from services.gateway.event_template import ChunkTemplate
from services.gateway.generation import FinishReason, TokenLogprob
from services.gateway.generation_options import GenerationOptions
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.sse import OPENAI_FRAMING, event
from services.gateway.text_preparation import PreparedPrompt
from services.gateway.tool_call_text import CallDelta, ToolCallParser


class ChatFormat:
    """One answer to a conversation."""

    framing = OPENAI_FRAMING

    def __init__(
        self,
        head: AnswerHead,
        options: GenerationOptions,
        prompt: PreparedPrompt,
        shapes: LogprobShapes,
        new_parser: Callable[[], ToolCallParser] | None = None,
    ) -> None:
        """Begin; ``new_parser`` makes what reads a choice's calls where tools may be called."""
        self._head = head
        self._options = options
        self._prompt = prompt
        self._shapes = shapes
        self._usage = RunningUsage(len(prompt.token_ids), options)
        self._templates: dict[int, ChunkTemplate] = {}
        self._new_parser = new_parser
        self._parsers: dict[int, ToolCallParser] = {}

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
        text, calls, reason = content.text, b"", _reason(content.finish_reason)
        if self._new_parser is not None:
            parser = self._parsers.setdefault(index, self._new_parser())
            parsed = parser.add(text, is_last=content.finish_reason is not None)
            text, reason = parsed.content, _reason(content.finish_reason, parser)
            calls = b"".join(
                event(orjson.dumps(self._chunk(index, {"tool_calls": [self._call_delta(index, call)]}, None)))
                for call in parsed.calls
            )
        if content.token_ids and (self._options.returns_token_ids or self._options.num_logprobs is not None):
            data += self._content_with_tokens(delta, text)
        else:
            data += self._content(index, text)
        data += calls
        if reason is not None:
            data += event(orjson.dumps(self._chunk(index, {}, reason)))
        return data

    def text_template(self, choice_index: int) -> ChunkTemplate | None:
        """Return the event of a next text where text is all that a chunk says."""
        is_plain = self._usage.is_constant and self._new_parser is None and not self._options.returns_token_ids
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

    def _content_with_tokens(self, delta: ChoiceDelta, text: str) -> bytes:
        """Return the event for tokens of which more is wanted than their text; they may have none yet."""
        token_ids = delta.content.token_ids
        more: dict[str, Any] = {"logprobs": self._logprobs(token_ids, delta.logprobs)}
        if self._options.returns_token_ids:
            more["token_ids"] = list(token_ids)
        return event(orjson.dumps(self._chunk(delta.choice_index, {"content": text}, None, more)))

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._options.num_logprobs is None:
            return None
        return {"content": self._shapes.chat_content(token_ids, logprobs), "refusal": None}

    def _choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        text, calls, parser = choice.text, [], None
        if self._new_parser is not None:
            parser = self._new_parser()
            parsed = parser.add(text, is_last=True)
            text, calls = parsed.content, self._whole_calls(index, parsed.calls)
        content = self._prompt.echoed_text + text
        message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        body: dict[str, Any] = {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": _reason(choice.finish_reason, parser),
        }
        return body | {"token_ids": choice.token_ids} if self._options.returns_token_ids else body

    def _whole_calls(self, choice_index: int, deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.name is not None:
                call = self._call_delta(choice_index, delta)
                calls.append({name: value for name, value in call.items() if name != "index"})
            else:
                calls[delta.call_index]["function"]["arguments"] += delta.arguments
        return calls

    def _call_delta(self, choice_index: int, delta: CallDelta) -> dict[str, Any]:
        """Return a part of a call: id and name with the first."""
        if delta.name is None:
            return {"index": delta.call_index, "function": {"arguments": delta.arguments}}
        key = f"{self._head.answer_id}/{choice_index}/{delta.call_index}"
        return {
            "index": delta.call_index,
            "id": f"call_{uuid.uuid5(uuid.NAMESPACE_OID, key).hex}",
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }

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


def _reason(reason: FinishReason | None, parser: ToolCallParser | None = None) -> str | None:
    if reason is FinishReason.STOP and parser is not None and parser.num_calls:
        return "tool_calls"
    return None if reason is None else reason.value
