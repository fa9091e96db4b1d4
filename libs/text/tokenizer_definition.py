"""What a tokenizer is, as data: vocabulary, token types, merges, and the steps around them.

Owns the form that every source of a tokenizer is brought into, and the digest over it that gateway and workers
compare. It must not know files, nor the library that runs the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

# A step of a tokenizer in the schema of tokenizer.json. Any: the schema belongs to the tokenizers library.
Step = Mapping[str, Any] | None

# Far beyond any vocabulary; models come from strangers.
MAX_TOKENS: Final = 4_194_304
MAX_MODEL_LEN: Final = 2**31 - 1
# Added tokens are looked for by expressions as deep as the longest of them.
MAX_ADDED_CHARACTERS: Final = 128

_DIGEST_TAG = b"octavo.tokenizer.v1\x00"


class TokenType(IntEnum):
    """The kinds of token; the numbers are GGUF's."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in text before the model of the tokenizer sees it."""

    token_id: int
    text: str
    is_special: bool
    strips_left: bool = False
    strips_right: bool = False
    is_single_word: bool = False
    is_normalized: bool = False


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The steps around the model: text → normalizer → pre-tokenizer → model → decoder → text."""

    normalizer: Step
    pre_tokenizer: Step
    decoder: Step


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """The tokens that have a role by name; templates see them as ``bos_token`` and so on."""

    texts: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """Return the text of the token called ``name``, for example ``eos_token``."""
        return self.texts.get(name)


@dataclass(frozen=True, slots=True)
class TokenizerDefinition:
    """A complete tokenizer as data. ``token_texts`` and ``token_types`` are in id order."""

    token_texts: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[tuple[str, str]]
    # Scores of the tokens where the vocabulary itself ranks the merges; empty otherwise.
    scores: Sequence[float]
    unknown_text: str | None
    has_byte_fallback: bool
    fuses_unknown: bool
    ignores_merges: bool
    pipeline: Pipeline
    added_tokens: Sequence[AddedToken]
    named_tokens: NamedTokens
    # What the tokenizer puts before a prompt that is plain text, usually nothing or BOS.
    prompt_prefix_token_ids: tuple[int, ...]

    def digest(self) -> bytes:
        """Hash all that decides which ids a text gets, into 32 bytes.

        The form is canonical: the same tokenizer has the same digest in every process and with every version of
        the tokenizers library. Two files may hold one tokenizer in different words; then their digests differ,
        which costs a refused registration, never a wrong cache hit.
        """
        rules = {
            "byte_fallback": self.has_byte_fallback,
            "fuse_unknown": self.fuses_unknown,
            "ignore_merges": self.ignores_merges,
            "normalizer": self.pipeline.normalizer,
            "pre_tokenizer": self.pipeline.pre_tokenizer,
        }
        digest = hashlib.sha256(_DIGEST_TAG)
        digest.update(_packed([json.dumps(rules, sort_keys=True, separators=(",", ":"))]))
        digest.update(_packed(self.token_texts))
        digest.update(bytes(self.token_types))
        digest.update(_packed(part for merge in self.merges for part in merge))
        digest.update(_little_endian(array("d", self.scores)))
        return digest.digest()


def checked_added_text(text: Any) -> str:  # Any: of a file.
    """Return the text of an added token; raises ValueError for what can be none."""
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_ADDED_CHARACTERS:
        raise ValueError(f"an added token must have 1 to {MAX_ADDED_CHARACTERS} characters")
    return text


def _packed(texts: Iterable[str]) -> bytes:
    """Encode a list of texts so that no two lists have the same bytes: count, lengths, contents."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    lengths = array("Q", [len(encoded), *map(len, encoded)])
    return _little_endian(lengths) + b"".join(encoded)


def _little_endian(values: array[Any]) -> bytes:  # Any: of ints or of floats.
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
