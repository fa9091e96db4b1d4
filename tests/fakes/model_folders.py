"""Model folders with the chat templates and control tokens of models that are not here, around a real tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from libs.text import load_model_text, resolve_model_path
from libs.text.tokenizer_definition import TokenizerDefinition
from tests.unit.text.small_models import tokenizer_json, write_folder

_TEMPLATES: Final = Path(__file__).resolve().parent.parent / "data" / "chat_templates"
# Control tokens by template; those that are no markers here take the place of tokens that nobody uses.
CONTROL_TOKENS: Final = {
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    "magistral": ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<think>",
        "</think>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    # Here the markers of reasoning are text, as those of Qwen3 are.
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁sep｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    "qwen3": (),
}
# Marks that are tokens and text.
TEXT_TOKENS: Final = {"qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>")}


def write_model_folder(path: Path, template: str) -> Path:
    """Write a model's text side: SmolLM2's tokenizer with the control tokens of another family."""
    definition = load_model_text(resolve_model_path("smollm2-135m-instruct")).tokenizer.definition
    renamed = _renamed(definition, CONTROL_TOKENS[template], TEXT_TOKENS.get(template, ()))
    config = {"max_position_embeddings": 8192, "eos_token_id": 2}
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    folder = write_folder(path, tokenizer_json(renamed), config=config, tokenizer_config=names)
    (folder / "chat_template.jinja").write_text((_TEMPLATES / f"{template}.jinja").read_text("utf-8"), "utf-8")
    return folder


def _renamed(
    definition: TokenizerDefinition, control: tuple[str, ...], text: tuple[str, ...]
) -> TokenizerDefinition:
    """Give control tokens other names; the first three have uses of their own."""
    names = (*control, *text)
    token_texts, added = list(definition.token_texts), list(definition.added_tokens)
    free = [index for index, token in enumerate(added) if token.token_id > 2]
    for index, name in zip(free, names, strict=False):
        token_texts[added[index].token_id] = name
        added[index] = dataclasses.replace(added[index], text=name, is_special=name in control)
    return dataclasses.replace(definition, token_texts=token_texts, added_tokens=added)
