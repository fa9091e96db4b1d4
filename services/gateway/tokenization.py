"""POST /tokenize and /detokenize: what the model's tokenizer and template make of a request, in vLLM's shapes; and
how many tokens that are, in Anthropic's.

Owns their fields and answers. Prompts become tokens here exactly as they do for a completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from libs.errors import InvalidRequest
from libs.text import IncrementalDetokenizer
from services.gateway.admission import Admission
from services.gateway.anthropic_schema import parse_token_count
from services.gateway.client_call import ClientCall
from services.gateway.generation_fields import ADD_SPECIAL_TOKENS, RETURN_TOKEN_STRINGS
from services.gateway.model_access import check_access
from services.gateway.openai_fields import check_fields
from services.gateway.openai_schema import ModelFacts, check_model_name, read_chat_prompt
from services.gateway.openai_values import are_token_ids
from services.gateway.prompts import Prompt, TextPrompt
from services.gateway.text_preparation import TextPreparation
from services.gateway.tools import read_tools

Parsed = TypeVar("Parsed")

TOKENIZE_TEXT_FIELDS: Final = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})
TOKENIZE_CHAT_FIELDS: Final = frozenset(
    {
        "model",
        "messages",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "tools",
        "return_token_strs",
    }
)
DETOKENIZE_FIELDS: Final = frozenset({"model", "tokens"})
# Of one token, in mean; only decides which threads do the work.
_CHARACTERS_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class TokenizationRequest:
    """What is to be tokenized, and whether the names of its tokens are wanted."""

    prompt: Prompt
    returns_strings: bool


class Tokenization:
    """Serves these routes."""

    def __init__(
        self,
        *,
        model: ModelFacts,
        text: TextPreparation,
        admission: Admission,
        max_model_len: Callable[[], int],
    ) -> None:
        self._model = model
        self._text = text
        self._admission = admission
        self._max_model_len = max_model_len

    async def tokenize(self, call: ClientCall[Any]) -> dict[str, Any]:
        """Return a prompt's tokens; raises OctavoError for what is no prompt."""
        with self._admission.admit() as slot, slot.interruptible():
            request = await self._parsed(call, parse_tokenization)
            token_ids = await self._text.run(
                lambda: self._text.token_ids_of(request.prompt), num_characters=request.prompt.num_characters
            )
        texts = self._text.model_text.tokenizer.definition.token_texts
        return {
            "count": len(token_ids),
            "max_model_len": self._max_model_len(),
            "tokens": token_ids,
            "token_strs": [texts[token_id] for token_id in token_ids] if request.returns_strings else None,
        }

    async def count_message_tokens(self, call: ClientCall[Any]) -> dict[str, Any]:
        """Return the number of a message request's tokens, for Anthropic's clients; raises OctavoError."""
        with self._admission.admit() as slot, slot.interruptible():
            prompt = await self._parsed(call, parse_token_count)
            token_ids = await self._text.run(
                lambda: self._text.token_ids_of(prompt), num_characters=prompt.num_characters
            )
        return {"input_tokens": len(token_ids)}

    async def detokenize(self, call: ClientCall[Any]) -> dict[str, Any]:
        """Return the text of tokens, control tokens included; raises OctavoError for what are no tokens."""
        with self._admission.admit() as slot, slot.interruptible():
            token_ids = await self._parsed(call, parse_detokenization)
            text = await self._text.run(
                lambda: self._text_of(token_ids), num_characters=_CHARACTERS_PER_TOKEN * len(token_ids)
            )
        return {"prompt": text}

    async def _parsed(
        self, call: ClientCall[Any], parse: Callable[[Mapping[str, Any], ModelFacts], Parsed]
    ) -> Parsed:
        body = await call.read_body()
        check_access(call.caller.tenant, self._model, _optional_model(body.fields, self._model))
        return await self._text.check(lambda: parse(body.fields, self._model), num_bytes=body.num_bytes)

    def _text_of(self, token_ids: list[int]) -> str:
        detokenizer = IncrementalDetokenizer(self._text.model_text.tokenizer, skip_special_tokens=False)
        return detokenizer.add(token_ids) + detokenizer.flush()


def parse_tokenization(body: Mapping[str, Any], model: ModelFacts) -> TokenizationRequest:
    """Check every field and return the request; raises InvalidRequest, which names the field, or ModelNotFound."""
    _optional_model(body, model)
    return TokenizationRequest(_read_prompt(body, model), RETURN_TOKEN_STRINGS.read(body))


def parse_detokenization(body: Mapping[str, Any], model: ModelFacts) -> list[int]:
    """Check every field and return the tokens; raises as ``parse_tokenization`` does."""
    _optional_model(body, model)
    check_fields(body, DETOKENIZE_FIELDS)
    token_ids = body.get("tokens")
    if not isinstance(token_ids, list) or not are_token_ids(token_ids, model.vocab_size):
        raise InvalidRequest(
            f"'tokens' must be a list of token ids from 0 to {model.vocab_size - 1}.", param="tokens"
        )
    return token_ids


def _optional_model(body: Mapping[str, Any], model: ModelFacts) -> str | None:
    name = body.get("model")
    if name is not None:
        if not isinstance(name, str):
            raise InvalidRequest("'model' must be a string.", param="model")
        check_model_name(name, model)
    return name


def _read_prompt(body: Mapping[str, Any], model: ModelFacts) -> Prompt:
    # Which of the two is null is as good as left out.
    if body.get("messages") is not None:
        check_fields(_without_null(body, "prompt"), TOKENIZE_CHAT_FIELDS)
        prompt = read_chat_prompt(body, model)
        return dataclasses.replace(
            prompt, tools=tuple(tool.as_value() for tool in read_tools(body.get("tools"), "tools"))
        )
    check_fields(_without_null(body, "messages"), TOKENIZE_TEXT_FIELDS)
    text = body.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequest("Give either 'prompt', a string, or 'messages'.", param="prompt")
    return TextPrompt(text, ADD_SPECIAL_TOKENS.read(body))


def _without_null(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {field: value for field, value in body.items() if field != name or value is not None}
