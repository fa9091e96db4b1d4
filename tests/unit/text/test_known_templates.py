from __future__ import annotations

import pytest

from libs.text.known_templates import known_chat_template

TURNS = ["<start_of_turn>", "<end_of_turn>"]


def test_gemmas_turns_have_a_template() -> None:
    template = known_chat_template("gemma3", ["<bos>", *TURNS])

    assert template is not None
    assert "<start_of_turn>" in template


@pytest.mark.parametrize(("architecture", "tokens"), [("gemma3", TURNS[:1]), ("gemma3", []), ("llama", TURNS)])
def test_what_is_not_known_has_none(architecture: str, tokens: list[str]) -> None:
    assert known_chat_template(architecture, tokens) is None
