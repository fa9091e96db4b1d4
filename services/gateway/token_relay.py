"""Tokens straight into an open stream, from within the engine step that brought them.

Owns the shortest way of a token: its text as JSON, between the two halves of a chunk, into the connection, or into
an answer that is sent whole. Nothing waits for it and no task is woken. It serves choices of whose tokens nothing
but their text is wanted, while the answer's own task has nothing to do and the connection takes bytes; everything
else is left to that task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from libs.text import Tokenizer
from services.gateway.accounting import RequestAccount
from services.gateway.answer_format import ChoiceDelta, WholeChoice
from services.gateway.event_template import ChunkTemplate, json_text
from services.gateway.output_text import OutputText


class RelayWriter(Protocol):
    """An open stream that may take bytes at once."""

    @property
    def is_clear(self) -> bool:
        """Whether bytes can be written without waiting."""

    def write_now(self, data: bytes) -> None:
        """Write a part of the stream where it is clear."""


class JsonPieces(dict[int, bytes]):
    """What each token is within a JSON string, for tokens that are whole characters wherever they stand.

    The others are empty: parts of characters, special tokens, and ids that no token has. Filled as tokens are seen.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return b""
        piece = b"" if self._tokenizer.is_special(token_id) else self._whole(token_id)
        self[token_id] = piece
        return piece

    def _whole(self, token_id: int) -> bytes:
        try:
            return json_text(self._tokenizer.token_bytes(token_id).decode())
        except UnicodeDecodeError:
            return b""


class WholeRelay:
    """Puts one choice's tokens into a whole answer, so that its task is woken only for the end."""

    __slots__ = ("_account", "_choice", "_output")

    def __init__(self, choice: WholeChoice, output: OutputText, account: RequestAccount) -> None:
        self._choice = choice
        self._output = output
        self._account = account

    def take(self, token_ids: Sequence[int], now: float) -> bool:
        """Take the tokens of a step at ``now``."""
        self._choice.add(ChoiceDelta(0, self._output.take(token_ids, None)))
        self._account.deliver_more(len(token_ids), now)
        return True

    def flush(self) -> None:
        """Do nothing: nobody reads before the end."""


class TokenRelay:
    """Writes one choice's tokens."""

    __slots__ = ("_account", "_events", "_is_settled", "_output", "_pieces", "_template", "_writer")

    def __init__(
        self,
        writer: RelayWriter,
        template: ChunkTemplate,
        output: OutputText,
        account: RequestAccount,
        pieces: JsonPieces,
    ) -> None:
        self._writer = writer
        self._template = template
        self._output = output
        self._account = account
        self._pieces = pieces
        self._events = b""
        self._is_settled = output.is_settled

    def take(self, token_ids: Sequence[int], now: float) -> bool:
        """Take the tokens of a step at ``now``; False, with nothing taken, where the connection is full."""
        if not self._writer.is_clear:
            return False
        piece = self._pieces[token_ids[0]] if self._is_settled and len(token_ids) == 1 else b""
        if piece:
            self._output.pass_by(1)
        else:
            piece = json_text(self._output.take(token_ids, None).text)
            self._is_settled = self._output.is_settled
        self._account.deliver_more(len(token_ids), now)
        if piece:
            self._events += self._template.event_of_json(piece)
        return True

    def flush(self) -> None:
        """Write what was taken: an event for each step, all at once."""
        if self._events:
            self._writer.write_now(self._events)
            self._events = b""
