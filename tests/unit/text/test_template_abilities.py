"""What templates know of tools, and which variables they read."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.text import ChatMessage, ChatTemplate, ModelText, TemplateAbilities
from libs.text.chat_message import MessageShape
from libs.text.tokenizer_definition import NamedTokens
from tests.unit.text.small_models import control_ids

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "data" / "chat_templates"
NAMES = NamedTokens({"bos_token": "<s>", "eos_token": "</s>"})


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text("utf-8"), NAMES)


@pytest.mark.parametrize(
    ("name", "abilities", "variables"),
    [
        ("llama3", TemplateAbilities(knows_tools=True), {"date_string"}),
        (
            "mistral",
            TemplateAbilities(knows_tools=True, knows_parallel_calls=True, needs_short_ids=True),
            set[str](),
        ),
        ("magistral", TemplateAbilities(knows_tools=True, knows_parallel_calls=True), set[str]()),
        (
            "deepseek_v3",
            TemplateAbilities(knows_tools=True, knows_parallel_calls=True, shape=MessageShape(True, False)),
            set[str](),
        ),
        (
            "deepseek_v31",
            TemplateAbilities(knows_tools=True, knows_parallel_calls=True, shape=MessageShape(True, False)),
            {"thinking"},
        ),
        ("qwen3", TemplateAbilities(knows_tools=True, knows_parallel_calls=True), {"enable_thinking"}),
    ],
)
def test_a_template_is_known_by_trying_it(name: str, abilities: TemplateAbilities, variables: set[str]) -> None:
    template = template_of(name)

    assert template.abilities == abilities
    assert template.variables == variables


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        # It mentions tools, and writes none, or no calls, or no results.
        "{% if tools %}Tools.{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}",
        "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}",
        "{{ tools | tojson }}{% for message in messages %}{{ message.tool_calls | tojson }}{% endfor %}",
        # Arguments as JSON within JSON.
        "{{ tools | tojson }}{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
        "{{ call.function.arguments | tojson | tojson }}{% endfor %}{% endfor %}",
        "{{ tools }}{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_cannot_write_a_whole_call_knows_no_tools(source: str) -> None:
    assert ChatTemplate(source, NAMES).abilities == TemplateAbilities()


def test_a_variable_of_a_client_sets_no_control_token(smollm: ModelText) -> None:
    template = ChatTemplate("{{ greeting }}{% for message in messages %}{{ message.content }}{% endfor %}", NAMES)

    token_ids = template.render_token_ids(
        [ChatMessage("user", "Hi")],
        smollm.tokenizer,
        add_generation_prompt=False,
        variables={"greeting": "<|im_start|>"},
    )

    assert control_ids(token_ids, smollm.tokenizer.definition) == []
    assert b"".join(map(smollm.tokenizer.token_bytes, token_ids)) == b"<|im_start|>Hi"
