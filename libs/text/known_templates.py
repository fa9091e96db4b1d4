"""Chat templates of models whose files leave them out.

Owns which vocabulary belongs to which template. It must not know how a template is rendered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class _KnownTemplate:
    control_tokens: frozenset[str]  # without which the template makes no sense
    source: str


# As Google publishes it with the instruction-tuned models. The pretrained ones have the same control tokens.
_GEMMA: Final = _KnownTemplate(
    control_tokens=frozenset({"<start_of_turn>", "<end_of_turn>"}),
    source="""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}
    {{- message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
""",
)
_BY_ARCHITECTURE: Final[Mapping[str, _KnownTemplate]] = {"gemma3": _GEMMA}


def known_chat_template(architecture: str, control_tokens: Collection[str]) -> str | None:
    """Return the template of ``architecture`` (GGUF's name), or None when none fits the control tokens."""
    known = _BY_ARCHITECTURE.get(architecture)
    return known.source if known is not None and known.control_tokens <= set(control_tokens) else None
