"""System prompts that the operator has declared as common to all tenants.

Owns which prompts begin with one. Their blocks may be found by every tenant, so only text that the operator wrote
can be shared, never text that a tenant sent first. It must not know HTTP or engines.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from libs.config import ConfigError
from libs.kv import SharedPrefix
from libs.text import ChatMessage, ModelText

# No tenant can have this id, so no tenant's salt equals the operator's.
_OPERATOR = b"octavo operator"


class SharedPrefixes:
    """The declared prompts as token ids, longest first."""

    def __init__(self, prefixes: Sequence[Sequence[int]], *, salt: bytes, block_size: int) -> None:
        self._salt = salt
        self._block_size = block_size
        whole_blocks = (list(ids[: len(ids) // block_size * block_size]) for ids in prefixes)
        self._prefixes = sorted((ids for ids in whole_blocks if ids), key=len, reverse=True)

    @classmethod
    def read(
        cls, files: Sequence[str], model_text: ModelText, *, salt_secret: bytes, block_size: int
    ) -> SharedPrefixes:
        """Read files with one system prompt each.

        Raises:
            ConfigError: a file cannot be read.
        """
        prefixes = [_leading_token_ids(_read(Path(file)), model_text) for file in files]
        return cls(prefixes, salt=hmac.digest(salt_secret, _OPERATOR, "sha256"), block_size=block_size)

    def find(self, prompt_token_ids: Sequence[int]) -> SharedPrefix | None:
        """Return the longest declared prompt that this one begins with, in whole blocks."""
        for ids in self._prefixes:
            if list(prompt_token_ids[: len(ids)]) == ids:
                return SharedPrefix(self._salt, len(ids) // self._block_size)
        return None


def _leading_token_ids(system_prompt: str, model_text: ModelText) -> list[int]:
    """Return the ids with which every conversation under this system prompt begins, whatever the user says."""
    system = ChatMessage("system", system_prompt)
    conversations = [
        model_text.chat_template.render_token_ids(
            [system, ChatMessage("user", text)], model_text.tokenizer, add_generation_prompt=True
        )
        for text in ("a", "Z 1")
    ]
    shortest = min(map(len, conversations))
    first, second = (np.array(ids[:shortest]) for ids in conversations)
    differing = np.flatnonzero(first != second)
    return conversations[0][: int(differing[0]) if len(differing) else shortest]


def _read(path: Path) -> str:
    try:
        # A final line break is the editor's, not the prompt's.
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The shared system prompt {path} cannot be read: {error}.") from error
