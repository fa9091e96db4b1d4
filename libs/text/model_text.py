"""All that the text side of a model needs, loaded from its folder or GGUF file in a moment.

Owns the choice between the two sources. It must not know tensors: nothing here imports torch or transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.text.chat_template import ChatTemplate, MissingChatTemplate
from libs.text.folder_tokenizer import (
    DEFAULT_TEMPLATE,
    TOOL_TEMPLATE,
    ModelFolder,
    folder_eos_token_ids,
    folder_max_model_len,
    folder_tokenizer_definition,
)
from libs.text.gguf_header import GgufHeader, read_gguf_header
from libs.text.gguf_tokenizer import gguf_eos_token_ids, gguf_max_model_len, gguf_tokenizer_definition
from libs.text.known_templates import known_chat_template
from libs.text.paired_templates import PairedTemplates
from libs.text.sampling_defaults import folder_sampling_defaults, gguf_sampling_defaults
from libs.text.tokenizer import Tokenizer
from libs.text.tokenizer_definition import NamedTokens


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of one model."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | MissingChatTemplate | PairedTemplates
    # 32 bytes; equal where gateway, engine and workers may exchange token ids.
    tokenizer_digest: bytes
    # Prompt and output together, in tokens.
    max_model_len: int
    # Any of these ends an answer.
    eos_token_ids: tuple[int, ...]
    # What belongs before a prompt of plain text (BOS for many models); chat templates write their own.
    prompt_prefix_token_ids: tuple[int, ...]
    # How to sample where a request says nothing, by the names of requests. Any: as the files have it, unchecked.
    sampling_defaults: Mapping[str, Any]


def load_model_text(path: Path) -> ModelText:
    """Load the text side of the model at ``path``, a folder or a GGUF file."""
    return _from_gguf(path) if path.is_file() else _from_folder(path)


def tokenizer_digest(path: Path) -> bytes:
    """Return the digest of the model's tokenizer without building the tokenizer."""
    if path.is_file():
        return gguf_tokenizer_definition(read_gguf_header(path)).digest()
    return folder_tokenizer_definition(ModelFolder.read(path)).digest()


def _from_gguf(path: Path) -> ModelText:
    header = read_gguf_header(path)
    tokenizer = Tokenizer.from_gguf(header)
    return ModelText(
        tokenizer=tokenizer,
        chat_template=_chat_template(_gguf_chat_templates(header, tokenizer), tokenizer.named_tokens),
        tokenizer_digest=tokenizer.definition.digest(),
        max_model_len=gguf_max_model_len(header),
        eos_token_ids=gguf_eos_token_ids(header),
        prompt_prefix_token_ids=tokenizer.definition.prompt_prefix_token_ids,
        sampling_defaults=gguf_sampling_defaults(header),
    )


def _gguf_chat_templates(header: GgufHeader, tokenizer: Tokenizer) -> Mapping[str, str]:
    control_tokens = {token.text for token in tokenizer.definition.added_tokens if token.is_special}
    templates = {
        DEFAULT_TEMPLATE: header.string("tokenizer.chat_template")
        or known_chat_template(header.string("general.architecture") or "", control_tokens),
        TOOL_TEMPLATE: header.string(f"tokenizer.chat_template.{TOOL_TEMPLATE}"),
    }
    return {name: source for name, source in templates.items() if source is not None}


def _from_folder(path: Path) -> ModelText:
    folder = ModelFolder.read(path)
    tokenizer = Tokenizer.from_folder(folder)
    return ModelText(
        tokenizer=tokenizer,
        chat_template=_chat_template(folder.chat_templates, tokenizer.named_tokens),
        tokenizer_digest=tokenizer.definition.digest(),
        max_model_len=folder_max_model_len(folder),
        eos_token_ids=folder_eos_token_ids(folder, tokenizer.definition),
        prompt_prefix_token_ids=tokenizer.definition.prompt_prefix_token_ids,
        sampling_defaults=folder_sampling_defaults(folder.generation_config),
    )


def _chat_template(
    sources: Mapping[str, str], named_tokens: NamedTokens
) -> ChatTemplate | MissingChatTemplate | PairedTemplates:
    default, tool_use = sources.get(DEFAULT_TEMPLATE), sources.get(TOOL_TEMPLATE)
    template = MissingChatTemplate() if default is None else ChatTemplate(default, named_tokens)
    return template if tool_use is None else PairedTemplates(template, ChatTemplate(tool_use, named_tokens))
