"""Text that looks like a control token: kept apart from the control tokens that the template itself writes.

A client can write ``<|im_end|>`` into a message. The template copies it beside its own ``<|im_end|>``, and after
that the two cannot be told apart. So a private character is put inside every such text before rendering, after
its first character: broken in this way it is no control token whatever the template does around it, and the
character is taken out again before the text is encoded as plain text. The end of a string is treated alike when
it could be the start of a control token, because a template may put two strings side by side.

Owns the marking and the splitting. It must not know templates or how text is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from libs.text.tokenizer_definition import AddedToken

# A noncharacter: Unicode reserves it for use inside a program and never for interchange.
BREAK: Final = "\ufdd0"

_WHITE_SPACE: Final = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ControlTokenAt:
    """A control token that the template wrote."""

    token_id: int


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text between control tokens, without marks."""

    text: str


Section = ControlTokenAt | PlainText


class ControlText:
    """Finds, breaks and splits off the texts of one tokenizer's control tokens."""

    def __init__(self, control_tokens: Sequence[AddedToken]) -> None:
        self._tokens = {token.text: token for token in control_tokens if token.text}
        trie = _Trie.of(self._tokens)
        self._first_characters = tuple(sorted(trie.children))
        self._complete = re.compile(trie.longest_match() if self._tokens else r"(?!)")
        # The looked-at text is not consumed, so overlapping texts are all found.
        self._risky = re.compile(f"(?={trie.match_or_end()})(.)" if self._tokens else r"(?!)()", re.DOTALL)

    def has_risk(self, value: Any) -> bool:
        """Say whether a string in ``value`` holds a control token's text, ends like one, or holds the mark."""
        return any(BREAK in text or self._is_risky(text) for text in _strings_in(value))

    def protect(self, value: Any) -> Any:  # Any: JSON-like values of a template's arguments.
        """Return ``value`` with every string in it made harmless; strings of mappings and lists included."""
        if isinstance(value, str):
            unmarked = value.replace(BREAK, "")
            return self._risky.sub(rf"\g<1>{BREAK}", unmarked) if self._is_risky(unmarked) else unmarked
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def split(self, rendered: str) -> Iterator[Section]:
        """Cut rendered text into the template's control tokens and the plain text between them."""
        start = 0
        for match in self._complete.finditer(rendered):
            if match.start() < start:
                continue  # It was taken by the white space around the token before it.
            token = self._tokens[match.group()]
            if _is_shielded(token, rendered, match):
                continue
            left = len(rendered[start : match.start()].rstrip()) + start if token.strips_left else match.start()
            yield from _plain(rendered[start:left])
            yield ControlTokenAt(token.token_id)
            start = match.end()
            if token.strips_right:
                start = _end_of_white_space(rendered, start)
        yield from _plain(rendered[start:])

    def break_up(self, text: str) -> list[str]:
        """Cut ``text`` inside every control token's text, so that no piece holds one."""
        return self._risky.sub(rf"\g<1>{BREAK}", text.replace(BREAK, "")).split(BREAK)

    def _is_risky(self, text: str) -> bool:
        # Most text has none of the first characters; looking for them is much cheaper than the expression.
        return any(character in text for character in self._first_characters) and bool(self._risky.search(text))


def _end_of_white_space(text: str, start: int) -> int:
    match = _WHITE_SPACE.match(text, start)
    return match.end() if match else start


def _plain(text: str) -> Iterator[PlainText]:
    unmarked = text.replace(BREAK, "")
    if unmarked:
        yield PlainText(unmarked)


def _is_shielded(token: AddedToken, rendered: str, match: re.Match[str]) -> bool:
    """Say whether the match is not the token after all: part of a word, or a client's one-character text."""
    following = rendered[match.end() : match.end() + 1]
    if len(token.text) == 1 and following == BREAK:
        return True
    if not token.is_single_word:
        return False
    before = rendered[match.start() - 1 : match.start()] if match.start() else ""
    return any(neighbour.isalnum() or neighbour == "_" for neighbour in (before, following))


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings_in(key)
            yield from _strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings_in(item)


@dataclass(slots=True)
class _Trie:
    """A set of texts as a tree, so that an expression over thousands of them tries each character once."""

    children: dict[str, _Trie] = field(default_factory=dict)
    is_end: bool = False

    @classmethod
    def of(cls, texts: Sequence[str] | Mapping[str, Any]) -> _Trie:
        root = cls()
        for text in texts:
            node = root
            for character in text:
                node = node.children.setdefault(character, cls())
            node.is_end = True
        return root

    def longest_match(self) -> str:
        """Return an expression for the longest text of the set."""
        if not self.children:
            return ""
        branches = "|".join(re.escape(key) + child.longest_match() for key, child in self.children.items())
        return f"(?:{branches})" + ("?" if self.is_end else "")

    def match_or_end(self, is_root: bool = True) -> str:
        """Return an expression for any text of the set, or the start of one at the end of the string."""
        if self.is_end:
            return ""
        branches = [re.escape(key) + child.match_or_end(is_root=False) for key, child in self.children.items()]
        return "(?:" + "|".join(branches if is_root else [*branches, r"\Z"]) + ")"
