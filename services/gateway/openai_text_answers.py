"""OpenAI's answers to a (legacy) completion: ``text_completion`` objects, whole and as chunks of a stream.

Owns their shape. With several prompts the choices are counted through: all of the first prompt, then of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.answer_format import AnswerHead, ChoiceDelta, UsageCounts, WholeChoice
from services.gateway.chunks import RunningUsage
from services.gateway.event_template import ChunkTemplate
from services.gateway.generation import FinishReason, TokenLogprob
from services.gateway.generation_options import GenerationOptions
from services.gateway.logprob_shapes import LogprobShapes, joined
from services.gateway.output_text import TextDelta
from services.gateway.sse import OPENAI_FRAMING, event
from services.gateway.text_preparation import PreparedPrompt


class TextFormat:
    """One answer to one or more prompts."""

    framing = OPENAI_FRAMING

    def __init__(
        self,
        head: AnswerHead,
        options: GenerationOptions,
        prompts: Sequence[PreparedPrompt],
        shapes: LogprobShapes,
    ) -> None:
        self._head = head
        self._options = options
        self._prompts = prompts
        self._shapes = shapes
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
            data += self._begin(delta)
        self._usage.add(len(content.token_ids))
        if content.token_ids and (self._options.returns_token_ids or self._options.num_logprobs is not None):
            more: dict[str, Any] = {"logprobs": self._output_logprobs(index, content, delta.logprobs)}
            if self._options.returns_token_ids:
                more["token_ids"] = list(content.token_ids)
            data += self._event(index, content.text, more=more)
        elif content.text:
            data += self._text_event(index, content.text)
        if content.finish_reason is not None:
            data += self._event(index, "", reason=content.finish_reason)
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
        found = [self._whole(index, choice) for index, choice in enumerate(choices)]
        return orjson.dumps(self._frame(found) | {"usage": counts.as_json()})

    def _whole(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        prompt = self._prompt_of(index)
        body = _choice(index, prompt.echoed_text + choice.text, choice.finish_reason)
        echoed = self._echoed_logprobs(prompt, choice.prompt_logprobs)
        output = self._output_logprobs(index, choice, choice.logprobs)
        if output is not None:
            body["logprobs"] = output if echoed is None else joined([echoed, output])
        if self._options.returns_token_ids:
            body |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt.token_ids}
        if self._options.num_prompt_logprobs is not None:
            body["prompt_logprobs"] = self._shapes.prompt_field(
                prompt.token_ids, choice.prompt_logprobs, self._options.num_prompt_logprobs
            )
        return body

    def _begin(self, delta: ChoiceDelta) -> bytes:
        """Make a choice's template and return its first event if it says something before the first text."""
        index, prompt = delta.choice_index, self._prompt_of(delta.choice_index)
        self._templates[index] = ChunkTemplate(lambda text: self._frame([_choice(index, text, None)]))
        more: dict[str, Any] = {}
        if self._options.num_echoed_logprobs is not None:
            more["logprobs"] = self._echoed_logprobs(prompt, delta.prompt_logprobs)
        if self._options.returns_token_ids:
            more["prompt_token_ids"] = prompt.token_ids
        return self._event(index, prompt.echoed_text, more=more) if prompt.echoed_text or more else b""

    def _echoed_logprobs(
        self, prompt: PreparedPrompt, logprobs: Sequence[TokenLogprob]
    ) -> dict[str, list[Any]] | None:
        """Return those of an echoed prompt, whose first token has none."""
        if self._options.num_echoed_logprobs is None:
            return None
        return self._shapes.text_part(
            prompt.token_ids,
            [None, *logprobs],
            prompt.echoed_offsets,
            num_alternatives=self._options.num_echoed_logprobs,
        )

    def _output_logprobs(
        self, index: int, content: TextDelta | WholeChoice, logprobs: Sequence[TokenLogprob]
    ) -> dict[str, list[Any]] | None:
        if self._options.num_logprobs is None:
            return None
        num_before = len(self._prompt_of(index).echoed_text)
        offsets = [num_before + offset for offset in content.text_offsets]
        return self._shapes.text_part(
            content.token_ids, logprobs, offsets, num_alternatives=self._options.num_logprobs
        )

    def _text_event(self, index: int, text: str) -> bytes:
        return self._templates[index].event_of(text) if self._usage.is_constant else self._event(index, text)

    def _event(
        self, index: int, text: str, *, reason: FinishReason | None = None, more: dict[str, Any] | None = None
    ) -> bytes:
        return event(orjson.dumps(self._frame([_choice(index, text, reason) | (more or {})])))

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
