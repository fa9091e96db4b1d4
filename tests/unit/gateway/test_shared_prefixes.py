"""System prompts that all tenants share."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.config import ConfigError
from libs.kv import SharedPrefix
from libs.text import ChatMessage, ModelText
from services.gateway.shared_prefixes import SharedPrefixes

SYSTEM_PROMPT = "You are a careful assistant of a library. " * 12


def prompt(model_text: ModelText, system: str, user: str) -> list[int]:
    messages = [ChatMessage("system", system), ChatMessage("user", user)]
    return model_text.chat_template.render_token_ids(messages, model_text.tokenizer, add_generation_prompt=True)


def test_the_longest_declared_prompt_counts_in_whole_blocks() -> None:
    prefixes = SharedPrefixes([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [9]], salt=b"s", block_size=2)

    assert prefixes.find([1, 2, 3, 4, 5, 6, 7, 8]) == SharedPrefix(b"s", 3)
    assert prefixes.find([1, 2, 3, 4, 5, 0]) == SharedPrefix(b"s", 2)
    assert prefixes.find([1, 2, 3, 0]) is None
    assert prefixes.find([9, 9]) is None


def test_a_conversation_under_a_declared_prompt_shares_its_blocks(tmp_path: Path, model_text: ModelText) -> None:
    file = tmp_path / "library.txt"
    file.write_text(SYSTEM_PROMPT + "\n")

    prefixes = SharedPrefixes.read([str(file)], model_text, salt_secret=b"secret", block_size=4)
    one = prefixes.find(prompt(model_text, SYSTEM_PROMPT, "Who wrote Hamlet?"))
    other = prefixes.find(prompt(model_text, SYSTEM_PROMPT, "12"))

    assert one is not None
    assert one == other
    assert one.num_blocks >= 4
    assert prefixes.find(prompt(model_text, SYSTEM_PROMPT[:-30], "Who wrote Hamlet?")) is None


def test_gateways_with_one_secret_agree_on_the_salt(tmp_path: Path, model_text: ModelText) -> None:
    file = tmp_path / "library.txt"
    file.write_text(SYSTEM_PROMPT)
    ids = prompt(model_text, SYSTEM_PROMPT, "hello")

    salts = []
    for secret in (b"secret", b"secret", b"another"):
        prefix = SharedPrefixes.read([str(file)], model_text, salt_secret=secret, block_size=4).find(ids)
        assert prefix is not None
        salts.append(prefix.salt)

    assert salts[0] == salts[1] != salts[2]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, model_text: ModelText) -> None:
    with pytest.raises(ConfigError, match="no-such-file"):
        SharedPrefixes.read([str(tmp_path / "no-such-file")], model_text, salt_secret=b"s", block_size=4)
