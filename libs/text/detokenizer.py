"""A stream of token ids to a stream of text, whole characters only.

Works on the bytes of tokens, so its cost is that of the new tokens and it never looks back. It must not know
requests or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from libs.text.decoding import LeadingSpace
from libs.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one choice's token ids into text as they come.

    Bytes that begin a character wait until it is complete. Bytes that cannot belong to any character become
    U+FFFD, one for each maximal part of a character (the rule of Unicode, section 3.9, and of the WHATWG): the
    same text comes out however the tokens are cut into calls, and it is what decoding all bytes at once gives.
    The space that some tokenizers put before a text is dropped, unless the tokens go on with a text that is shown
    before (``is_continued``). Special tokens are left out unless asked for or among ``kept_token_ids``; bytes on
    both sides of one still form a character together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        is_continued: bool = False,
        kept_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._kept_token_ids = kept_token_ids
        self._skips_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoding = tokenizer.decoding
        drops_from_token = decoding.leading_space is LeadingSpace.DROPPED_FROM_FIRST_TOKEN
        self._is_first_token = drops_from_token and not is_continued
        self._num_spaces_to_drop = 0 if is_continued else decoding.max_spaces_dropped

    def add(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is now certain."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    @property
    def is_settled(self) -> bool:
        """Whether the next token's text depends on nothing before: no character and no leading space is open."""
        return not (self._is_first_token or self._num_spaces_to_drop or self._decoder.getstate()[0])

    def flush(self) -> str:
        """Return what an unfinished character at the end becomes: U+FFFD, or nothing when none is pending."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        if self._skips_special_tokens and self._tokenizer.is_special(token_id):
            return self._tokenizer.token_bytes(token_id) if token_id in self._kept_token_ids else b""
        text = self._tokenizer.token_bytes(token_id)
        if self._is_first_token:
            self._is_first_token = False
            return text.replace(b" ", b"")
        while self._num_spaces_to_drop and text:
            if not text.startswith(b" "):
                self._num_spaces_to_drop = 0
                break
            text = text[1:]
            self._num_spaces_to_drop -= 1
        return text
