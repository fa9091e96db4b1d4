"""Text to token ids, and token ids to bytes.

Owns the two backends of one vocabulary: one that finds control tokens in text and one for which their text is
plain. Built from a model folder or a GGUF header; every method may be called from many threads at once. It must
not know templates, requests or streams of output.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import tokenizers
from tokenizers import models

from libs.errors import InvalidRequest, ModelLoadFailed
from libs.text.control_text import ControlText, ControlTokenAt
from libs.text.decoding import Alphabet, Decoding, parse_decoder
from libs.text.folder_tokenizer import ModelFolder, folder_tokenizer_definition
from libs.text.gguf_header import GgufHeader
from libs.text.gguf_tokenizer import gguf_tokenizer_definition, merges_by_score
from libs.text.tokenizer_definition import (
    AddedToken,
    NamedTokens,
    Pipeline,
    Step,
    TokenizerDefinition,
    TokenType,
)

# One text at a time is encoded, so other threads of the library's own would only be woken for nothing.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPECIAL_TYPES: Final = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


class _Position(StrEnum):
    """Where a piece of plain text stands; it decides whether the tokenizer puts a space before it."""

    START = "start"
    AFTER_CONTROL = "after_control"
    WITHIN_TEXT = "within_text"


class Tokenizer:
    """One model's tokenizer."""

    def __init__(self, definition: TokenizerDefinition, model: models.Model) -> None:
        self._definition = definition
        self._decoding = parse_decoder(definition.pipeline.decoder)
        self._special = _build_backend(model, definition.pipeline, definition.added_tokens, special_is_plain=False)
        self._plain_by_position = _plain_backends(model, definition)
        self._special_token_ids = frozenset(
            token_id for token_id, kind in enumerate(definition.token_types) if kind in _SPECIAL_TYPES
        )
        control_tokens = [token for token in definition.added_tokens if token.is_special]
        self._control_ids_by_text = {token.text: token.token_id for token in control_tokens}
        self._control_text = ControlText(control_tokens)
        # The unknown token is what plain text without any token becomes, so it does not count here.
        self._control_token_ids = frozenset(
            token.token_id for token in control_tokens if token.text != definition.unknown_text
        )
        self._max_bytes_in_token = _max_bytes_in_token(definition, self._decoding)
        # Filled as tokens are seen: most of a vocabulary never is. Threads may both fill a place, with equal bytes.
        self._bytes_of_token: list[bytes | None] = [None] * len(definition.token_texts)

    @classmethod
    def from_gguf(cls, header: GgufHeader) -> Tokenizer:
        """Build the tokenizer that a GGUF file carries."""
        definition = gguf_tokenizer_definition(header)
        merges = list(definition.merges) or merges_by_score(definition)
        vocabulary: dict[str, int] = {}
        for token_id, text in enumerate(definition.token_texts):
            vocabulary.setdefault(text, token_id)
        try:
            model = models.BPE(
                vocab=vocabulary,
                merges=merges,
                unk_token=definition.unknown_text,
                fuse_unk=definition.fuses_unknown,
                byte_fallback=definition.has_byte_fallback,
                ignore_merges=definition.ignores_merges,
            )
        except Exception as error:  # The library raises bare Exception for a merge of unknown tokens.
            raise ModelLoadFailed(f"The tokenizer in {header.path.name} is broken: {error}.") from error
        return cls(definition, model)

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> Tokenizer:
        """Build the tokenizer of a model folder."""
        # Refused here where it is no tokenizer: of some of those the library makes gigabytes, or dies.
        folder_tokenizer_definition(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder.path / "tokenizer.json"))
        except Exception as error:  # The library raises bare Exception for a file that it does not understand.
            raise ModelLoadFailed(f"The tokenizer.json of {folder.path.name} cannot be loaded: {error}.") from error
        # Both are for training, and would hide what stands before a prompt.
        backend.no_truncation()
        backend.no_padding()
        definition = folder_tokenizer_definition(folder, _prompt_prefix_of(backend))
        model = backend.model
        if isinstance(model, models.BPE):
            # For training, too: a text would have other tokens each time.
            model.dropout = None
        return cls(definition, model)

    @property
    def definition(self) -> TokenizerDefinition:
        """The tokenizer as data."""
        return self._definition

    @property
    def vocab_size(self) -> int:
        """The number of token ids, added tokens included."""
        return len(self._definition.token_texts)

    @property
    def decoding(self) -> Decoding:
        """How token texts stand for bytes."""
        return self._decoding

    @property
    def named_tokens(self) -> NamedTokens:
        """The tokens with a role by name, as templates see them."""
        return self._definition.named_tokens

    @property
    def control_text(self) -> ControlText:
        """Keeps a client's text apart from control tokens while a template is rendered."""
        return self._control_text

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Return the ids of ``text``, without the prompt's prefix.

        With ``allow_special`` the text of a control token becomes that token; without, it is text like any other.
        """
        _require_well_formed(text)
        if allow_special:
            return _encode(self._special, text)
        return self._encode_plain(text, _Position.START)

    def min_num_tokens(self, text: str) -> int:
        """Return how many tokens ``text`` has at least, without tokenizing it; 0 where nothing can be said.

        No token stands for more bytes than the longest one, as long as nothing is taken out of the text before.
        """
        if self._max_bytes_in_token is None:
            return 0
        # A copy of megabytes takes milliseconds; plain ASCII needs none.
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="replace"))
        return -(-num_bytes // self._max_bytes_in_token)

    def encode_protected(self, rendered: str) -> list[int]:
        """Return the ids of text that was rendered from values which ``control_text`` protects."""
        _require_well_formed(rendered)
        token_ids: list[int] = []
        position = _Position.START
        for section in self._control_text.split(rendered):
            if isinstance(section, ControlTokenAt):
                token_ids.append(section.token_id)
            else:
                token_ids.extend(self._encode_plain(section.text, position))
            position = _Position.AFTER_CONTROL
        return token_ids

    def to_json(self) -> str:
        """Return the tokenizer as the contents of a ``tokenizer.json``, in which control tokens are recognized."""
        return self._special.to_str()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; an id that no token has (vocabularies are padded) has none."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes_of_token[token_id]
        if known is None:
            kind = self._definition.token_types[token_id]
            known = self._decoding.bytes_of(self._definition.token_texts[token_id], kind)
            self._bytes_of_token[token_id] = known
        return known

    def is_special(self, token_id: int) -> bool:
        """Say whether the token is control, not text: begin, end, turn marks, unknown."""
        return token_id in self._special_token_ids

    def control_token_id(self, text: str) -> int | None:
        """Return the control token whose text this is, or None for other text."""
        return self._control_ids_by_text.get(text)

    def _encode_plain(self, text: str, position: _Position) -> list[int]:
        token_ids = _encode(self._plain_by_position[position], text)
        if self._control_token_ids.isdisjoint(token_ids):
            return token_ids
        # The model itself makes a control token from the text. It cannot when the text comes to it in pieces.
        token_ids = []
        for piece in self._control_text.break_up(text):
            token_ids.extend(_encode(self._plain_by_position[position], piece))
            position = _Position.WITHIN_TEXT
        if self._control_token_ids.isdisjoint(token_ids):
            return token_ids
        raise InvalidRequest("The text holds a control token of the model that has no plain spelling; remove it.")


def _max_bytes_in_token(definition: TokenizerDefinition, decoding: Decoding) -> int | None:
    """Return the most bytes of text that one token can stand for; None where text may vanish before."""
    can_lose_text = (
        definition.pipeline.normalizer is not None
        or decoding.alphabet is not Alphabet.BYTE_LEVEL
        or any(token.strips_left or token.strips_right for token in definition.added_tokens)
    )
    if can_lose_text:
        return None
    # In the byte-level alphabet a character is one byte; the text of added tokens is as it is.
    added = (len(token.text.encode(errors="replace")) for token in definition.added_tokens)
    return max(*map(len, definition.token_texts), *added)


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    # Of the library's ways to encode, only those for batches release the interpreter's lock while they work.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _require_well_formed(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which stands for no character; send well-formed Unicode."
        ) from error


def _plain_backends(
    model: models.Model, definition: TokenizerDefinition
) -> Mapping[_Position, tokenizers.Tokenizer]:
    """Build the backends for plain text; where the position makes no difference, one serves for all."""
    pipelines = {
        _Position.START: definition.pipeline,
        _Position.AFTER_CONTROL: _without_prefix(definition.pipeline, only_at_start=True),
        _Position.WITHIN_TEXT: _without_prefix(definition.pipeline, only_at_start=False),
    }
    backends: dict[_Position, tokenizers.Tokenizer] = {}
    for position, pipeline in pipelines.items():
        same = next((other for other in backends if pipelines[other] == pipeline), None)
        backends[position] = (
            backends[same]
            if same is not None
            else _build_backend(model, pipeline, definition.added_tokens, special_is_plain=True)
        )
    return backends


def _build_backend(
    model: models.Model, pipeline: Pipeline, added_tokens: Sequence[AddedToken], *, special_is_plain: bool
) -> tokenizers.Tokenizer:
    """Build a backend around ``model``, which all backends of a vocabulary share."""
    without_model: dict[str, Any] = {  # Any: the schema of tokenizer.json.
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": pipeline.normalizer,
        "pre_tokenizer": pipeline.pre_tokenizer,
        "post_processor": None,
        "decoder": pipeline.decoder,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(without_model))
    except Exception as error:  # The library raises bare Exception for a step that it does not know.
        raise ModelLoadFailed(f"The tokenizer has a step that cannot be built: {error}.") from error
    backend.model = model
    backend.add_tokens(
        [
            tokenizers.AddedToken(
                token.text,
                special=token.is_special,
                lstrip=token.strips_left,
                rstrip=token.strips_right,
                single_word=token.is_single_word,
                normalized=token.is_normalized,
            )
            for token in sorted(added_tokens, key=lambda token: token.token_id)
        ]
    )
    for token in added_tokens:
        if backend.token_to_id(token.text) != token.token_id:
            raise ModelLoadFailed(f"The added token {token.text!r} cannot have the id {token.token_id}.")
    backend.encode_special_tokens = special_is_plain
    return backend


def _without_prefix(pipeline: Pipeline, *, only_at_start: bool) -> Pipeline:
    return Pipeline(
        normalizer=_step_without_prefix(pipeline.normalizer, only_at_start=only_at_start),
        pre_tokenizer=_step_without_prefix(pipeline.pre_tokenizer, only_at_start=only_at_start),
        decoder=pipeline.decoder,
    )


def _step_without_prefix(step: Step, *, only_at_start: bool) -> Step:
    """Return ``step`` without the space that it puts before text: only at the start, or everywhere."""
    if step is None:
        return None
    changed: dict[str, Any] = dict(step)  # Any: the schema of tokenizer.json.
    for key in ("normalizers", "pretokenizers"):
        if key in changed:
            parts = [_step_without_prefix(part, only_at_start=only_at_start) for part in changed[key]]
            changed[key] = [part for part in parts if part is not None]
    kind = changed.get("type")
    if kind == "Metaspace" and (changed.get("prepend_scheme") == "first" or not only_at_start):
        changed |= {"prepend_scheme": "never", "add_prefix_space": False}
    if kind == "ByteLevel" and not only_at_start:
        changed["add_prefix_space"] = False
    if kind == "Prepend" and not only_at_start:
        return None
    return changed


def _prompt_prefix_of(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return what the post-processor puts before a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
