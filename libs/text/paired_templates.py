"""Two chat templates of one model: one for conversations with tools, one for the others.

Owns which of them a conversation is rendered with. It must not know how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from libs.text.chat_message import ChatMessage
from libs.text.chat_template import ChatTemplate, MissingChatTemplate, do_nothing
from libs.text.template_abilities import TemplateAbilities
from libs.text.tokenizer import Tokenizer

_NO_VARIABLES: Final[Mapping[str, Any]] = {}


class PairedTemplates:
    """A model's default template, and the one that is for requests with tools, as transformers chooses them."""

    def __init__(self, default: ChatTemplate | MissingChatTemplate, tool_use: ChatTemplate) -> None:
        self._default = default
        self._tool_use = tool_use

    @property
    def source(self) -> str:
        """Both sources, for what looks in them for the model's forms."""
        return f"{self._default.source or ''}\n{self._tool_use.source}"

    @property
    def variables(self) -> frozenset[str]:
        """What a caller may set in either."""
        return self._default.variables | self._tool_use.variables

    @property
    def abilities(self) -> TemplateAbilities:
        """What the template for tools knows of them."""
        return self._tool_use.abilities

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """Return a conversation as text."""
        return self._default.render(messages, add_generation_prompt=add_generation_prompt)

    def render_token_ids(
        self,
        messages: Sequence[ChatMessage],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
        on_rendered: Callable[[], None] = do_nothing,
    ) -> list[int]:
        """Return a conversation as token ids."""
        template = self._tool_use if tools else self._default
        return template.render_token_ids(
            messages,
            tokenizer,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
            on_rendered=on_rendered,
        )
