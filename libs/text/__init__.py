"""Text and token ids: tokenizers, chat templates, and the way back.

Loads the text side of a model from its folder or GGUF file without torch, transformers or llama.cpp.
"""

from libs.text.chat_message import ChatMessage, ToolCall
from libs.text.chat_template import ChatTemplate, MissingChatTemplate
from libs.text.detokenizer import IncrementalDetokenizer
from libs.text.model_path import EMBEDDED_MODEL_NAME, default_served_model_name, resolve_model_path
from libs.text.model_text import ModelText, load_model_text, tokenizer_digest
from libs.text.template_abilities import TemplateAbilities
from libs.text.tokenizer import Tokenizer

__all__ = [
    "EMBEDDED_MODEL_NAME",
    "ChatMessage",
    "ChatTemplate",
    "IncrementalDetokenizer",
    "MissingChatTemplate",
    "ModelText",
    "TemplateAbilities",
    "Tokenizer",
    "ToolCall",
    "default_served_model_name",
    "load_model_text",
    "resolve_model_path",
    "tokenizer_digest",
]
