"""How a token's text stands for bytes.

Owns the two alphabets in use: GPT-2's, which has a printable character for every byte, and sentencepiece's, where
``▁`` is a space and ``<0x0A>`` a byte. Decoding is defined on bytes here, so that a detokenizer never has to guess
from decoded text what a token contributed. It must not know ids or streams.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from libs.errors import ModelLoadFailed
from libs.text.tokenizer_definition import Step, TokenType

SPACE_MARK: Final = "▁"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Alphabet(StrEnum):
    """What the characters of a token's text stand for."""

    BYTE_LEVEL = "byte_level"
    SENTENCEPIECE = "sentencepiece"


class LeadingSpace(StrEnum):
    """Which spaces the decoder drops at the start of a text."""

    KEPT = "kept"
    DROPPED_FROM_TEXT = "dropped_from_text"
    DROPPED_FROM_FIRST_TOKEN = "dropped_from_first_token"


@dataclass(frozen=True, slots=True)
class Decoding:
    """The rule by which one tokenizer's tokens become bytes."""

    alphabet: Alphabet
    has_byte_fallback: bool
    leading_space: LeadingSpace
    # How many spaces go where they are dropped from the text; the first token loses all that it starts with.
    max_spaces_dropped: int

    def bytes_of(self, text: str, token_type: int) -> bytes:
        """Return the bytes that a token with this text contributes to the output."""
        if token_type in (TokenType.CONTROL, TokenType.UNKNOWN):
            return text.encode("utf-8", "replace")
        if self.alphabet is Alphabet.BYTE_LEVEL:
            return text.encode() if token_type == TokenType.USER_DEFINED else byte_level_bytes(text)
        byte = _BYTE_TOKEN.fullmatch(text) if self.has_byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE_MARK, " ").encode("utf-8", "replace")


def is_byte_token(text: str) -> bool:
    """Say whether the text is sentencepiece's name of a single byte, such as ``<0x0A>``."""
    return _BYTE_TOKEN.fullmatch(text) is not None


def byte_level_bytes(text: str) -> bytes:
    """Return the bytes that GPT-2's alphabet writes as ``text``; a text outside of it stands for itself."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in text])
    except KeyError:
        return text.encode("utf-8", "replace")


def parse_decoder(decoder: Step) -> Decoding:
    """Understand the decoder of a tokenizer.json; refuse one whose output cannot be made token by token."""
    steps = _flattened(decoder)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return Decoding(Alphabet.BYTE_LEVEL, False, LeadingSpace.KEPT, 0)
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise ModelLoadFailed(
            f"The tokenizer decodes with {kinds or 'nothing'}; byte-level and sentencepiece decoders are supported."
        )
    has_byte_fallback = "ByteFallback" in kinds
    for step in steps:
        _refuse_other_replacement(step)
    if any(step["type"] == "Metaspace" and _prepends(step) for step in steps):
        return Decoding(Alphabet.SENTENCEPIECE, has_byte_fallback, LeadingSpace.DROPPED_FROM_FIRST_TOKEN, 0)
    if num_spaces := sum(_spaces_stripped(step) for step in steps):
        return Decoding(Alphabet.SENTENCEPIECE, has_byte_fallback, LeadingSpace.DROPPED_FROM_TEXT, num_spaces)
    return Decoding(Alphabet.SENTENCEPIECE, has_byte_fallback, LeadingSpace.KEPT, 0)


def _flattened(step: Step) -> Sequence[Mapping[str, Any]]:  # Any: the schema of tokenizer.json.
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [leaf for part in step["decoders"] for leaf in _flattened(part)]
    return [step]


def _refuse_other_replacement(step: Mapping[str, Any]) -> None:
    match step["type"]:
        case "Replace":
            is_known = step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
        case "Metaspace":
            is_known = step.get("replacement", SPACE_MARK) == SPACE_MARK
        case "Strip":
            is_known = step.get("content") == " " and step.get("stop", 0) == 0
        case _:
            is_known = True
    if not is_known:
        raise ModelLoadFailed(f"The tokenizer's decoder has the step {dict(step)}, which is not supported.")


def _prepends(step: Mapping[str, Any]) -> bool:
    scheme = step.get("prepend_scheme")
    return scheme != "never" if scheme is not None else bool(step.get("add_prefix_space", True))


def _spaces_stripped(step: Mapping[str, Any]) -> int:
    return int(step.get("start", 0)) if step["type"] == "Strip" else 0


def _byte_level_alphabet() -> dict[str, int]:
    """Build GPT-2's table: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_level_alphabet()
