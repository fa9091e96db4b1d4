"""From messages to token ids, away from the event loop.

Owns the threads that render templates, tokenize and hash, and the rule how much output fits beside a prompt. It
must not know HTTP or engines.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from libs.errors import ContextLengthExceeded, InvalidRequest
from libs.kv import HASH_ALGORITHM, HashContract, PrefixHash, SharedPrefix, prefix_hashes
from libs.text import ModelText
from services.gateway.openai_schema import ValidChatCompletion
from services.gateway.shared_prefixes import SharedPrefixes

_LONG_TEXT_CHARACTERS = 256 * 1024


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as engines and routers know it."""

    token_ids: list[int]
    prefix_hashes: list[PrefixHash]
    shared_prefix: SharedPrefix | None = None


class TextPreparation:
    """Renders and tokenizes for one model.

    Its queue is bounded by the number of requests that the gateway admits.
    """

    def __init__(
        self, model_text: ModelText, shared_prefixes: SharedPrefixes, *, block_size: int, num_threads: int
    ) -> None:
        self.model_text = model_text
        self._shared_prefixes = shared_prefixes
        self.hash_contract = HashContract(block_size, HASH_ALGORITHM, model_text.tokenizer_digest)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        # Long texts queue among themselves, so that they cannot hold up everybody else.
        self._long_text_thread = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    async def prepare(
        self, request: ValidChatCompletion, *, cache_salt: bytes, max_model_len: int
    ) -> PreparedPrompt:
        """Render, tokenize and hash a request's messages.

        A prompt beyond ``max_model_len`` comes back without hashes: it will not be served.

        Raises:
            TemplateRefused: the model's template does not take these messages.
        """
        num_characters = sum(len(message.content) for message in request.messages)
        threads = self._threads if num_characters <= _LONG_TEXT_CHARACTERS else self._long_text_thread
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self._prepare, request, cache_salt, max_model_len)

    def close(self) -> None:
        """Stop the threads; work that has not begun is dropped."""
        for threads in (self._threads, self._long_text_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, request: ValidChatCompletion, cache_salt: bytes, max_model_len: int) -> PreparedPrompt:
        token_ids = self.model_text.chat_template.render_token_ids(
            request.messages, self.model_text.tokenizer, add_generation_prompt=True
        )
        if len(token_ids) >= max_model_len:
            return PreparedPrompt(token_ids, [])
        shared_prefix = self._shared_prefixes.find(token_ids)
        hashes = prefix_hashes(token_ids, self.hash_contract.block_size, cache_salt, shared_prefix)
        return PreparedPrompt(token_ids, hashes, shared_prefix)


def fit_output(
    request: ValidChatCompletion, *, num_prompt_tokens: int, max_model_len: int, default_max_tokens: int | None
) -> int:
    """Return the output limit of a request in tokens.

    A limit that the client gave must fit beside the prompt. Without one it is the room that is left, at most
    ``default_max_tokens``.

    Raises:
        ContextLengthExceeded: prompt and output do not fit together.
    """
    room = max_model_len - num_prompt_tokens
    wanted = max(request.max_output_tokens or 1, request.min_output_tokens)
    if wanted > room:
        raise ContextLengthExceeded.of(
            num_prompt_tokens=num_prompt_tokens, max_output_tokens=wanted, max_model_len=max_model_len
        )
    if request.max_output_tokens is not None:
        return request.max_output_tokens
    limit = room if default_max_tokens is None else min(room, default_max_tokens)
    if request.min_output_tokens > limit:
        raise InvalidRequest(
            f"'min_tokens' is greater than this server's default limit of {limit}; give 'max_tokens' too.",
            param="min_tokens",
        )
    return limit
