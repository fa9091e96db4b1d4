"""OpenAI's answers to a (legacy) completion: ``text_completion`` objects, whole and as chunks of a stream.

Owns their shape. With several prompts the choices are counted through: all of the first prompt, then of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.chunks import ChunkTemplate, RunningUsage
from services.gateway.generation import FinishReason
from services.gateway.generation_options import GenerationOptions
from services.gateway.sse import event
from services.gateway.text_preparation import PreparedPrompt


class TextFormat:
    """One answer to one or more prompts."""

    def __init__(self, head: AnswerHead, options: GenerationOptions, prompts: Sequence[PreparedPrompt]) -> None:
        self._head = head
        self._options = options
        self._prompts = prompts
        self._usage = RunningUsage(sum(len(prompt.token_ids) for prompt in prompts), options)
        self._templates: dict[int, ChunkTemplate] = {}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self._options.includes_usage

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the prompt with a choice's first delta if it is echoed, its text, and why it ended."""
        index, content = delta.choice_index, delta.content
        data = b""
        if index not in self._templates:
            data += self._begin(index)
        self._usage.add(len(content.token_ids))
        if self._options.returns_token_ids and content.token_ids:
            data += self._event(index, content.text, extra={"token_ids": list(content.token_ids)})
        elif content.text:
            data += self._text_event(index, content.text)
        if content.finish_reason is not None:
            data += self._event(index, "", reason=content.finish_reason)
        return data

    def usage_event(self, counts: UsageCounts) -> bytes:
        """Return the event with the counts."""
        return event(orjson.dumps(self._frame([]) | {"usage": counts.as_json()}))

    def body(self, choices: Sequence[WholeChoice], counts: UsageCounts) -> bytes:
        """Return a whole answer."""
        found = [self._whole(index, choice) for index, choice in enumerate(choices)]
        return orjson.dumps(self._frame(found) | {"usage": counts.as_json()})

    def _whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        prompt = self._prompt_of(index)
        body = _choice(index, prompt.echoed_text + choice.text, choice.finish_reason)
        if self._options.returns_token_ids:
            body |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt.token_ids}
        return body

    def _begin(self, index: int) -> bytes:
        """Make a choice's template and return its first event if it says something before the first text."""
        self._templates[index] = ChunkTemplate(lambda text: self._frame([_choice(index, text, None)]))
        prompt = self._prompt_of(index)
        if self._options.returns_token_ids:
            return self._event(index, prompt.echoed_text, extra={"prompt_token_ids": prompt.token_ids})
        return self._text_event(index, prompt.echoed_text) if prompt.echoed_text else b""

    def _text_event(self, index: int, text: str) -> bytes:
        return self._templates[index].event_of(text) if self._usage.is_constant else self._event(index, text)

    def _event(
        self, index: int, text: str, *, reason: FinishReason | None = None, extra: dict[str, Any] | None = None
    ) -> bytes:
        return event(orjson.dumps(self._frame([_choice(index, text, reason) | (extra or {})])))

    def _prompt_of(self, index: int) -> PreparedPrompt:
        return self._prompts[index // self._options.num_choices]

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._head.answer_id,
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        } | self._usage.fields


def _choice(index: int, text: str, reason: FinishReason | None) -> dict[str, Any]:
    return {
        "text": text,
        "index": index,
        "logprobs": None,
        "finish_reason": None if reason is None else reason.value,
    }
