"""Log-probabilities as clients see them: OpenAI's two shapes and vLLM's of prompts.

Owns how a token is named and that bytes are exact, also where a token is a part of a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from libs.text import Tokenizer
from services.gateway.generation import TokenLogprob

# JSON has no infinity; vLLM's stand-in for it.
_LOWEST: Final = -9999.0


class LogprobShapes:
    """Shapes the log-probabilities of one model's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat_content(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return the entries of a chat's ``logprobs.content``."""
        return [
            self._chat_token(token_id, entry.logprob)
            | {"top_logprobs": [self._chat_token(*alternative) for alternative in entry.alternatives]}
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]

    def text_part(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        offsets: Sequence[int],
        *,
        num_alternatives: int,
    ) -> dict[str, list[Any]]:
        """Return the ``logprobs`` of a plain completion's choice, or a part of them."""
        entries = list(zip(token_ids, logprobs, strict=True))
        return {
            "text_offset": list(offsets),
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, entry in entries],
            "tokens": [self._text_name(token_id) for token_id in token_ids],
            "top_logprobs": [
                None if entry is None else self._text_alternatives(token_id, entry, num_alternatives)
                for token_id, entry in entries
            ],
        }

    def prompt_field(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], num_alternatives: int
    ) -> list[dict[str, Any] | None]:
        """Return vLLM's ``prompt_logprobs``: null for the first token; for others, they and the likeliest."""
        return [None] + [
            self._prompt_token(token_id, entry, num_alternatives)
            for token_id, entry in zip(token_ids[1:], logprobs, strict=True)
        ]

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = self._tokenizer.token_bytes(token_id)
        return {
            "token": token_bytes.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(token_bytes),
        }

    def _text_name(self, token_id: int) -> str:
        """Return a token's text, or where it is none its bytes as OpenAI writes them, so that names differ."""
        token_bytes = self._tokenizer.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def _text_alternatives(self, token_id: int, entry: TokenLogprob, num_alternatives: int) -> dict[str, float]:
        """Return the likeliest tokens and, as OpenAI does, the token itself if it is not among them."""
        found: dict[str, float] = {}
        for alternative, logprob in (*entry.alternatives[:num_alternatives], (token_id, entry.logprob)):
            found.setdefault(self._text_name(alternative), _finite(logprob))
        return found

    def _prompt_token(self, token_id: int, entry: TokenLogprob, num_alternatives: int) -> dict[str, Any]:
        ranked = enumerate(entry.alternatives[:num_alternatives], start=1)
        found: dict[str, Any] = {}
        for one_id, logprob, rank in chain(
            [(token_id, entry.logprob, entry.rank)], ((*alternative, rank) for rank, alternative in ranked)
        ):
            name = self._tokenizer.token_bytes(one_id).decode(errors="replace")
            found.setdefault(str(one_id), {"logprob": _finite(logprob), "rank": rank, "decoded_token": name})
        return found


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Put parts of a plain completion's ``logprobs`` together."""
    return {name: list(chain.from_iterable(part[name] for part in parts)) for name in parts[0]}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
