"""What a form of calls is: how a model writes them, how they are read, and the grammar that holds them.

Owns the interface and what grammars of all forms are made of. A new form is one more object.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import orjson

from libs.text import Tokenizer
from services.gateway.model_formats.text_reader import Reading, TextReader


class Vocabulary:
    """How a grammar spells a marker: by its token where the model has one that is no text, else by its letters."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Take the control tokens of ``tokenizer``; without one, all markers are text."""
        added = () if tokenizer is None else tokenizer.definition.added_tokens
        self._token_ids = {token.text: token.token_id for token in added}
        self._control_token_ids = {token.text: token.token_id for token in added if token.is_special}

    def token_id(self, marker: str) -> int | None:
        """Return the token that is the marker, control or text, if there is one."""
        return self._token_ids.get(marker)

    def control_token_id(self, marker: str) -> int | None:
        """Return the control token that is the marker, if there is one."""
        return self._control_token_ids.get(marker)

    def term(self, marker: str) -> str:
        """Return the marker as llguidance's Lark has it."""
        token_id = self.control_token_id(marker)
        return self.text(marker) if token_id is None else f"<[{token_id}]>"

    def text(self, text: str) -> str:
        """Return plain text as Lark has it."""
        return orjson.dumps(text).decode()


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Calls in llguidance's Lark."""

    # What calls begin with and text cannot hold; None where they have no marker.
    begin: str | None
    # The expression of all calls, after the marker.
    calls: str
    rules: Sequence[str]
    # Without a marker: a regular expression for text that begins as calls do.
    looks_like_calls: str | None = None


class ToolFormat(Protocol):
    """One form of calls."""

    @property
    def name(self) -> str:
        """The form's name in settings."""

    @property
    def markers(self) -> Sequence[str]:
        """What stands around calls; where it is a control token it is needed in the text that is read."""

    def read(self, reader: TextReader, names: Collection[str]) -> Reading[None]:
        """Take all of an answer's text; calls of other functions than ``names`` are text."""

    def grammar(
        self, tools: Sequence[tuple[str, str]], max_calls: int, vocabulary: Vocabulary
    ) -> CallGrammar | None:
        """Return the grammar of 1 to ``max_calls`` calls; a tool is its name and the rule of its arguments.

        None where the form has none: such calls can be neither required nor held to a schema.
        """

    @property
    def instruction(self) -> str:
        """How to call, for models whose template does not say it."""

    def call_text(self, name: str, arguments: str) -> str:
        """Return a call as a model writes it, for templates that do not know calls; ``arguments`` is JSON."""


def call_object(vocabulary: Vocabulary, name: str, key: str, arguments: str) -> str:
    """Return the expression of a call as JSON; ``arguments`` is the rule of what stands under ``key``."""
    head = f'{{"name": "{name}", "{key}": '
    return f"{vocabulary.text(head)} {arguments} {vocabulary.text('}')}"


def repeated(first: str, further: str, max_calls: int) -> str:
    """Return the expression of one call and more."""
    return first if max_calls == 1 else f"{first} ({further}){{0,{max_calls - 1}}}"
