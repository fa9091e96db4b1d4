"""A tokenizer from a model folder with ``tokenizer.json`` and its companions.

Owns which file of a folder says what, and which wins when two do. It must not know how a tokenizer is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from libs.errors import ModelLoadFailed
from libs.text.context_length import max_context_length
from libs.text.decoding import is_byte_token
from libs.text.pointer_files import refuse_pointer
from libs.text.tokenizer_definition import (
    MAX_MODEL_LEN,
    MAX_TOKENS,
    AddedToken,
    NamedTokens,
    Pipeline,
    TokenizerDefinition,
    TokenType,
    checked_added_text,
)

# Any: these files have the schemas of the tokenizers and transformers libraries.
JsonObject = Mapping[str, Any]

# What the transformers library calls the template of all conversations, and that of those with tools.
DEFAULT_TEMPLATE: Final = "default"
TOOL_TEMPLATE: Final = "tool_use"
_ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_CONTROL_BRACKETS: Final = (("<|", "|>"), ("<｜", "｜>"))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The text-side files of a model folder, parsed."""

    path: Path
    tokenizer: JsonObject
    tokenizer_config: JsonObject
    config: JsonObject
    generation_config: JsonObject
    chat_templates: Mapping[str, str]  # by name

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Read the files of the folder at ``path``; only tokenizer.json has to be there."""
        tokenizer_file = path / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ModelLoadFailed(
                f"The model folder {path.name} has no tokenizer.json. Make one with "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        tokenizer_config = _read_object(path / "tokenizer_config.json")
        return cls(
            path=path,
            tokenizer=_read_object(tokenizer_file),
            tokenizer_config=tokenizer_config,
            config=_read_object(path / "config.json"),
            generation_config=_read_object(path / "generation_config.json"),
            chat_templates=_chat_templates(path, tokenizer_config),
        )


def folder_tokenizer_definition(
    folder: ModelFolder, prompt_prefix_token_ids: tuple[int, ...] = ()
) -> TokenizerDefinition:
    """Build the definition; the caller says what the post-processor puts before a prompt.

    Raises:
        ModelLoadFailed: the file is JSON, and no tokenizer.
    """
    try:
        return _definition(folder, prompt_prefix_token_ids)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelLoadFailed(
            f"The tokenizer of {folder.path.name} has a part of another form than a tokenizer has: {error}."
        ) from error


def _definition(folder: ModelFolder, prompt_prefix_token_ids: tuple[int, ...]) -> TokenizerDefinition:
    model = folder.tokenizer.get("model") or {}
    texts, scores = _vocabulary(model, folder.path.name)
    added_tokens = _added_tokens(folder, texts)
    by_id = dict(enumerate(texts)) | {token.token_id: token.text for token in added_tokens}
    token_texts = [by_id.get(token_id, "") for token_id in range(_num_ids(by_id))]
    unknown_text = _unknown_text(model, token_texts)
    has_byte_fallback = bool(model.get("byte_fallback"))
    return TokenizerDefinition(
        token_texts=token_texts,
        token_types=_token_types(token_texts, added_tokens, unknown_text if has_byte_fallback else None),
        merges=[_merge_pair(merge) for merge in model.get("merges") or ()],
        scores=scores,
        unknown_text=unknown_text,
        has_byte_fallback=has_byte_fallback,
        fuses_unknown=bool(model.get("fuse_unk")),
        ignores_merges=bool(model.get("ignore_merges")),
        pipeline=Pipeline(
            normalizer=folder.tokenizer.get("normalizer"),
            pre_tokenizer=folder.tokenizer.get("pre_tokenizer"),
            decoder=folder.tokenizer.get("decoder"),
        ),
        added_tokens=added_tokens,
        named_tokens=_named_tokens(folder),
        prompt_prefix_token_ids=prompt_prefix_token_ids,
    )


def folder_eos_token_ids(folder: ModelFolder, definition: TokenizerDefinition) -> tuple[int, ...]:
    """Return the ids that end an answer: what the generation config says, and the tokenizer's end token."""
    file_name, configured = "generation_config.json", folder.generation_config.get("eos_token_id")
    if configured is None:
        file_name, configured = "config.json", folder.config.get("eos_token_id")
    listed = configured if isinstance(configured, list) else [configured]
    ids = {token.text: token.token_id for token in definition.added_tokens}
    found = [token_id for token_id in listed if token_id is not None]
    for token_id in found:
        # type, because True is an int to Python.
        if type(token_id) is not int or not 0 <= token_id < len(definition.token_texts):
            raise ModelLoadFailed(
                f"The {file_name} of {folder.path.name} names the end token {token_id!r}, but its tokenizer has "
                f"the tokens 0 to {len(definition.token_texts) - 1}; correct eos_token_id."
            )
    named = ids.get(definition.named_tokens.text("eos_token") or "")
    return tuple(dict.fromkeys([*found, *([] if named is None else [named])]))


def folder_max_model_len(folder: ModelFolder) -> int:
    """Return the longest context that the model was made for, in tokens."""
    text_config = folder.config.get("text_config")
    max_model_len = max_context_length(folder.config)
    if not max_model_len and isinstance(text_config, dict):
        max_model_len = max_context_length(text_config)
    if type(max_model_len) is not int or not 0 < max_model_len <= MAX_MODEL_LEN:
        raise ModelLoadFailed(f"The config.json of {folder.path.name} has no max_position_embeddings; add it.")
    return max_model_len


def _read_object(path: Path) -> JsonObject:
    if not path.is_file():
        return {}
    try:
        refuse_pointer(path)
        parsed = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ModelLoadFailed(f"{path.parent.name}/{path.name} cannot be read: {error}.") from error
    if not isinstance(parsed, dict):
        raise ModelLoadFailed(f"{path.parent.name}/{path.name} is not a JSON object.")
    return parsed


def _chat_templates(path: Path, tokenizer_config: JsonObject) -> Mapping[str, str]:
    """Return the sources of the chat templates by name: files of their own, or what the configuration has."""
    files = {
        DEFAULT_TEMPLATE: path / "chat_template.jinja",
        TOOL_TEMPLATE: path / "additional_chat_templates" / f"{TOOL_TEMPLATE}.jinja",
    }
    read = {name: _read_text(file, path) for name, file in files.items() if file.is_file()}
    return read if DEFAULT_TEMPLATE in read else _configured_templates(path, tokenizer_config) | read


def _read_text(file: Path, folder: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadFailed(f"{folder.name}/{file.name} cannot be read: {error}.") from error


def _configured_templates(path: Path, tokenizer_config: JsonObject) -> dict[str, str]:
    configured = tokenizer_config.get("chat_template")
    if isinstance(configured, list):
        entries = {str(one.get("name")): one.get("template") for one in configured if isinstance(one, dict)}
        named = {name: entries.get(name) for name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE)}
    else:
        named = {DEFAULT_TEMPLATE: configured}
    if not all(template is None or isinstance(template, str) for template in named.values()):
        raise ModelLoadFailed(
            f"The chat_template in {path.name}/tokenizer_config.json is neither a text nor a list of named texts."
        )
    return {name: template for name, template in named.items() if template is not None}


def _vocabulary(model: JsonObject, name: str) -> tuple[list[str], list[float]]:
    """Return texts in id order, and scores where the model has them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):
        return [text for text, _ in vocabulary], [float(score) for _, score in vocabulary]
    if not isinstance(vocabulary, dict):
        raise ModelLoadFailed(f"The tokenizer.json of {name} has no vocabulary.")
    texts = [""] * _num_ids(vocabulary.values())
    for text, token_id in vocabulary.items():
        texts[token_id] = text
    return texts, []


def _num_ids(token_ids: Collection[int]) -> int:
    """Return the number of ids up to the highest; a file may name a high one to have gigabytes of them made."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < MAX_TOKENS:
        raise ValueError(f"token ids must be from 0 to {MAX_TOKENS - 1}")
    return max(token_ids, default=-1) + 1


def _unknown_text(model: JsonObject, token_texts: Sequence[str]) -> str | None:
    unknown_id = model.get("unk_id")
    return token_texts[unknown_id] if isinstance(unknown_id, int) else model.get("unk_token")


def _token_types(
    token_texts: Sequence[str], added_tokens: Sequence[AddedToken], byte_fallback_unknown: str | None
) -> list[int]:
    types = [int(TokenType.NORMAL if text else TokenType.UNUSED) for text in token_texts]
    if byte_fallback_unknown is not None:
        for token_id, text in enumerate(token_texts):
            if is_byte_token(text):
                types[token_id] = TokenType.BYTE
    for token in added_tokens:
        types[token.token_id] = TokenType.CONTROL if token.is_special else TokenType.USER_DEFINED
        if token.text == byte_fallback_unknown:
            types[token.token_id] = TokenType.UNKNOWN
    return types


def _added_tokens(folder: ModelFolder, texts: Sequence[str]) -> list[AddedToken]:
    """Return what tokenizer.json adds, and what only tokenizer_config.json knows to be a token of its own.

    As in transformers: with its end token plain text an answer of such a model would never end.
    """
    added = [_added_token(entry) for entry in folder.tokenizer.get("added_tokens") or ()]
    ids = {text: token_id for token_id, text in enumerate(texts) if text}
    ids |= {token.text: token.token_id for token in added}
    known_texts, next_id = {token.text for token in added}, max(len(texts), 1 + max(ids.values(), default=-1))
    for entry in _declared_tokens(folder, ids):
        token = _added_token(entry)
        # One that is not in the vocabulary comes behind it; what contradicts tokenizer.json does not count.
        if token.text not in known_texts and ids.get(token.text, next_id) == token.token_id:
            added.append(token)
            known_texts.add(token.text)
            next_id = max(next_id, token.token_id + 1)
    return added


def _declared_tokens(folder: ModelFolder, ids: Mapping[str, int]) -> Iterator[JsonObject]:
    """Yield tokens that tokenizer_config.json declares, in the form of tokenizer.json."""
    config, named = folder.tokenizer_config, _named_tokens(folder)
    decoder = {int(token_id): entry for token_id, entry in (config.get("added_tokens_decoder") or {}).items()}
    for token_id, entry in sorted(decoder.items()):
        yield {**entry, "id": token_id}
    # Not those of other roles: some models are padded with a word.
    for name in (
        named.text("bos_token"),
        named.text("eos_token"),
        *(config.get("additional_special_tokens") or ()),
    ):
        text = name.get("content") if isinstance(name, dict) else name
        if isinstance(text, str) and text in ids:
            yield {"id": ids[text], "content": text, "special": True}


def _added_token(entry: JsonObject) -> AddedToken:
    text = checked_added_text(entry["content"])
    return AddedToken(
        token_id=entry["id"],
        text=text,
        # Some models forget the flag on their own control tokens; converters to GGUF go by the brackets, too.
        is_special=_flag(entry, "special") or _looks_like_control(text),
        strips_left=_flag(entry, "lstrip"),
        strips_right=_flag(entry, "rstrip"),
        is_single_word=_flag(entry, "single_word"),
        is_normalized=_flag(entry, "normalized"),
    )


def _flag(entry: JsonObject, name: str) -> bool:
    value = entry.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} of an added token must be true or false")
    return value


def _looks_like_control(text: str) -> bool:
    return any(text.startswith(start) and text.endswith(end) for start, end in _CONTROL_BRACKETS)


def _merge_pair(merge: Any) -> tuple[str, str]:
    """Understand both ways in which tokenizer.json writes a merge: ``"a b"`` and ``["a", "b"]``."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _named_tokens(folder: ModelFolder) -> NamedTokens:
    special_tokens_map = _read_object(folder.path / "special_tokens_map.json")
    found: dict[str, str] = {}
    for role in _ROLES:
        entry = folder.tokenizer_config.get(role) or special_tokens_map.get(role)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            found[role] = text
    return NamedTokens(found)
