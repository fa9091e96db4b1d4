"""A tokenizer from the metadata of a GGUF file.

Owns the knowledge of what GGUF's tokenizer keys mean: two families of tokenizer, the pre-tokenizers by their
names, and the defaults that converters rely on. It must not know tensors, or how a tokenizer is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from libs.errors import ModelLoadFailed
from libs.text.decoding import SPACE_MARK
from libs.text.gguf_header import GgufHeader
from libs.text.tokenizer_definition import (
    MAX_MODEL_LEN,
    AddedToken,
    NamedTokens,
    Pipeline,
    Step,
    TokenizerDefinition,
    TokenType,
    checked_added_text,
)

_NOT_MERGED: Final = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE})
_ROLES: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# A token is tried at every place where it could be split.
_MAX_SPLIT_CHARACTERS: Final = 4_096
_END_KEYS: Final = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
# -1 as an unsigned number, llama.cpp's word for no such token.
_NO_TOKEN: Final = 2**32 - 1
# Older files name only one end token, often the one that ends a document instead of a turn.
_END_OF_TURN_TEXTS: Final = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>"})


def gguf_tokenizer_definition(header: GgufHeader) -> TokenizerDefinition:
    """Read the tokenizer that ``header`` describes."""
    model = header.string("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            return _byte_level_bpe(header)
        if model == "llama":
            return _sentencepiece_bpe(header)
    except ValueError as error:
        raise ModelLoadFailed(f"{header.path.name} has a tokenizer that cannot be: {error}.") from error
    raise ModelLoadFailed(
        f"{header.path.name} has a tokenizer of the kind {model!r}; gpt2 and llama are supported. "
        "Use the model's folder with its tokenizer.json instead."
    )


def gguf_eos_token_ids(header: GgufHeader) -> tuple[int, ...]:
    """Return the ids that end an answer, the file's own end token first."""
    texts, _ = _vocabulary(header)
    named = [token_id for key in _END_KEYS if (token_id := _token_id(header, key, len(texts))) is not None]
    known = [token_id for token_id, text in enumerate(texts) if text in _END_OF_TURN_TEXTS]
    return tuple(dict.fromkeys([*named, *known]))


def gguf_max_model_len(header: GgufHeader) -> int:
    """Return the longest context that the model was made for, in tokens."""
    architecture = header.string("general.architecture")
    max_model_len = header.integer(f"{architecture}.context_length")
    if max_model_len is None or not 0 < max_model_len <= MAX_MODEL_LEN:
        raise ModelLoadFailed(f"{header.path.name} lacks the key {architecture}.context_length; convert it again.")
    return max_model_len


def _byte_level_bpe(header: GgufHeader) -> TokenizerDefinition:
    texts, types = _vocabulary(header)
    merges = header.strings("tokenizer.ggml.merges")
    if merges is None:
        raise ModelLoadFailed(f"{header.path.name} lacks the key tokenizer.ggml.merges; convert it again.")
    name = header.string("tokenizer.ggml.pre")
    split = _PRE_TOKENIZERS.get(name or "")
    if split is None:
        raise ModelLoadFailed(
            f"{header.path.name} names the pre-tokenizer {name!r}; "
            f"supported are {', '.join(sorted(_PRE_TOKENIZERS))}. "
            "Use the model's folder with its tokenizer.json instead."
        )
    return TokenizerDefinition(
        token_texts=texts,
        token_types=types,
        merges=[_merge_pair(merge, header) for merge in merges],
        scores=(),
        unknown_text=None,
        has_byte_fallback=False,
        fuses_unknown=False,
        ignores_merges=split.ignores_merges,
        pipeline=Pipeline(
            normalizer=split.normalizer, pre_tokenizer=split.pre_tokenizer, decoder=_BYTE_LEVEL_DECODER
        ),
        added_tokens=_added_tokens(texts, types),
        named_tokens=_named_tokens(header, texts),
        prompt_prefix_token_ids=_prompt_prefix(header, is_default=split.adds_bos),
    )


def _sentencepiece_bpe(header: GgufHeader) -> TokenizerDefinition:
    texts, types = _vocabulary(header)
    if max(map(len, texts)) > _MAX_SPLIT_CHARACTERS:
        raise ValueError(f"a token has more than {_MAX_SPLIT_CHARACTERS} characters")
    scores = header.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(texts):
        raise ModelLoadFailed(f"{header.path.name} has no score for each token (tokenizer.ggml.scores).")
    adds_prefix = header.boolean("tokenizer.ggml.add_space_prefix")
    has_prefix = adds_prefix is None or adds_prefix
    unknown = next((text for text, kind in zip(texts, types, strict=True) if kind == TokenType.UNKNOWN), None)
    return TokenizerDefinition(
        token_texts=texts,
        token_types=types,
        merges=(),
        scores=scores,
        unknown_text=unknown,
        has_byte_fallback=TokenType.BYTE in types,
        fuses_unknown=True,
        ignores_merges=False,
        pipeline=_sentencepiece_pipeline(has_prefix=has_prefix),
        # Sentencepiece looks for them when spaces have become marks. With a prefix each would get one of its own.
        added_tokens=_added_tokens(texts, types, is_matched_after_normalizing=not has_prefix),
        named_tokens=_named_tokens(header, texts),
        prompt_prefix_token_ids=_prompt_prefix(header, is_default=True),
    )


def merges_by_score(definition: TokenizerDefinition) -> list[tuple[str, str]]:
    """Return the merges that a sentencepiece vocabulary implies: every split of a token, best score first.

    Control, unknown and byte tokens are never the result of a merge, as in sentencepiece itself; otherwise plain
    text could become a control token. Between splits of one token the one with the earlier parts goes first, as
    in the conversion of transformers.
    """
    ids = {text: token_id for token_id, text in enumerate(definition.token_texts)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token_id, text in enumerate(definition.token_texts):
        if definition.token_types[token_id] in _NOT_MERGED:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                ranked.append((-definition.scores[token_id], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _vocabulary(header: GgufHeader) -> tuple[Sequence[str], Sequence[int]]:
    texts = header.strings("tokenizer.ggml.tokens")
    if not texts:
        raise ModelLoadFailed(f"{header.path.name} has no vocabulary (tokenizer.ggml.tokens).")
    types = header.numbers("tokenizer.ggml.token_type")
    if types is None:
        types = (TokenType.NORMAL,) * len(texts)
    if len(types) != len(texts) or not set(types) <= set(TokenType):
        raise ModelLoadFailed(f"{header.path.name} has no valid type for each token (tokenizer.ggml.token_type).")
    return texts, [
        # Some converters forget what these are. As plain text they would end no turn; llama.cpp corrects it, too.
        int(TokenType.CONTROL if text in _END_OF_TURN_TEXTS else kind)
        for text, kind in zip(texts, types, strict=True)
    ]


def _merge_pair(merge: str, header: GgufHeader) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ModelLoadFailed(f"{header.path.name} has the malformed merge {merge!r}.")
    return left, right


def _added_tokens(
    texts: Sequence[str], types: Sequence[int], *, is_matched_after_normalizing: bool = False
) -> list[AddedToken]:
    return [
        AddedToken(
            token_id=token_id,
            text=checked_added_text(texts[token_id]),
            is_special=kind != TokenType.USER_DEFINED,
            is_normalized=is_matched_after_normalizing and kind == TokenType.USER_DEFINED,
        )
        for token_id, kind in enumerate(types)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN) and texts[token_id]
    ]


def _named_tokens(header: GgufHeader, texts: Sequence[str]) -> NamedTokens:
    found: dict[str, str] = {}
    for role, key in _ROLES.items():
        token_id = _token_id(header, key, len(texts))
        if token_id is not None:
            found[role] = texts[token_id]
    return NamedTokens(found)


def _token_id(header: GgufHeader, key: str, num_tokens: int) -> int | None:
    """Return the token that ``key`` names, or None when it names none."""
    token_id = header.integer(key)
    if token_id is None or token_id == _NO_TOKEN:
        return None
    if not 0 <= token_id < num_tokens:
        raise ModelLoadFailed(f"{header.path.name}: {key} is {token_id}, outside of the vocabulary.")
    return token_id


def _prompt_prefix(header: GgufHeader, *, is_default: bool) -> tuple[int, ...]:
    adds_bos = header.boolean("tokenizer.ggml.add_bos_token")
    bos_token_id = _token_id(header, "tokenizer.ggml.bos_token_id", len(_vocabulary(header)[0]))
    is_added = is_default if adds_bos is None else adds_bos
    return (bos_token_id,) if is_added and bos_token_id is not None else ()


def _sentencepiece_pipeline(*, has_prefix: bool) -> Pipeline:
    mark_spaces: Step = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    unmark_spaces: Step = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    decoders = [unmark_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if not has_prefix:
        return Pipeline(mark_spaces, None, {"type": "Sequence", "decoders": decoders})
    prepend: Step = {"type": "Prepend", "prepend": SPACE_MARK}
    strip: Step = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return Pipeline(
        normalizer={"type": "Sequence", "normalizers": [prepend, mark_spaces]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": [*decoders, strip]},
    )


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is cut before byte-level BPE, in the schema of tokenizer.json."""

    pre_tokenizer: Step
    normalizer: Step = None
    ignores_merges: bool = False
    adds_bos: bool = False


def _byte_level(*, use_regex: bool) -> Mapping[str, str | bool]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_then_byte_level(expression: str) -> Step:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


# The expressions of Llama 3 and Qwen 2, which differ only in how many digits stay together.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2: Final = _PreTokenizer(_byte_level(use_regex=True))
_LLAMA3: Final = _PreTokenizer(_split_then_byte_level(_WORDS % "{1,3}"), ignores_merges=True, adds_bos=True)
_QWEN2: Final = _PreTokenizer(_split_then_byte_level(_WORDS % ""), normalizer={"type": "NFC"})
# Each digit is cut off first; the rest is cut as for GPT-2. White space before a digit thereby loses its neighbour.
_SMOLLM: Final = _PreTokenizer(
    {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    }
)
_PRE_TOKENIZERS: Final[Mapping[str, _PreTokenizer]] = {
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _SMOLLM,
}
_BYTE_LEVEL_DECODER: Final = _byte_level(use_regex=True)
