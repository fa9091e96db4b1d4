"""What the chunks of streams have in common: the counts beside them. It must not know the shape of a choice."""

from __future__ import annotations

from typing import Any

from services.gateway.answer_format import UsageCounts
from services.gateway.generation_options import GenerationOptions


class RunningUsage:
    """The ``usage`` field of chunks as a stream goes on."""

    def __init__(self, num_prompt_tokens: int, options: GenerationOptions) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_completion_tokens = 0
        self._is_continuous = options.has_continuous_usage
        self._is_shown = options.includes_usage or options.has_continuous_usage

    @property
    def is_constant(self) -> bool:
        """Whether all chunks have the same field."""
        return not self._is_continuous

    def add(self, num_tokens: int) -> None:
        """Count tokens of any choice."""
        self._num_completion_tokens += num_tokens

    @property
    def fields(self) -> dict[str, Any]:
        """The field for the next chunk; clients that ask for usage at the end find null in all chunks before."""
        if not self._is_shown:
            return {}
        counts = UsageCounts(self._num_prompt_tokens, self._num_completion_tokens, None)
        return {"usage": counts.as_json() if self._is_continuous else None}
