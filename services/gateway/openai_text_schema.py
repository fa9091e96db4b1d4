"""OpenAI's (legacy) completion request: from a JSON object to a type that cannot be wrong.

Owns the forms of its prompts and their bounds. It must not know HTTP, tokenizers or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from libs.errors import InvalidRequest
from services.gateway.generation import MAX_CHOICES
from services.gateway.generation_fields import ADD_SPECIAL_TOKENS, ECHO, TEXT_LOGPROBS, TEXT_MAX_TOKENS
from services.gateway.generation_options import GenerationOptions, parse_generation_options
from services.gateway.openai_fields import check_text_fields
from services.gateway.openai_schema import ModelFacts, read_max_output_tokens, read_model_name
from services.gateway.openai_values import are_token_ids
from services.gateway.prompts import TextPrompt, TokenPrompt

MAX_PROMPTS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidTextCompletion:
    """A completion request in which every value can be served."""

    model: str
    prompts: tuple[TextPrompt | TokenPrompt, ...]
    options: GenerationOptions


def parse_text_completion(body: Mapping[str, Any], model: ModelFacts) -> ValidTextCompletion:
    """Check every field and return the request.

    Raises:
        InvalidRequest: a value that cannot be served; names the field.
        UnsupportedField: a field that is known and not served.
        ModelNotFound: another model.
    """
    check_text_fields(body)
    model_name = read_model_name(body, model)
    prompts = _prompts(body, model.vocab_size)
    num_logprobs = TEXT_LOGPROBS.read(body)
    options = parse_generation_options(
        body,
        vocab_size=model.vocab_size,
        max_output_tokens=read_max_output_tokens(body, TEXT_MAX_TOKENS),
        num_logprobs=num_logprobs,
        num_echoed_logprobs=num_logprobs if ECHO.read(body) else None,
        defaults=model.sampling_defaults,
    )
    shows_prompt = options.echoes_prompt or options.num_prompt_logprobs is not None
    if options.max_output_tokens == 0 and not shows_prompt:
        raise InvalidRequest("'max_tokens' can be 0 only with 'echo' or 'prompt_logprobs'.", param="max_tokens")
    if len(prompts) * options.num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {options.num_choices} choices each are more than {MAX_CHOICES} choices.",
            param="n",
        )
    return ValidTextCompletion(model=model_name, prompts=prompts, options=options)


def _prompts(body: Mapping[str, Any], vocab_size: int) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the prompts: of a string, a list of strings, a list of token ids, or a list of such lists."""
    given = body.get("prompt")
    if given is None:
        raise InvalidRequest("'prompt' must be given.", param="prompt")
    adds_special = ADD_SPECIAL_TOKENS.read(body)
    if isinstance(given, str):
        return (TextPrompt(given, adds_special),)
    if not isinstance(given, list) or not given:
        raise _wrong_prompt()
    if type(given[0]) is int:
        return (_token_prompt(given, vocab_size),)
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"'prompt' takes at most {MAX_PROMPTS} prompts.", param="prompt")
    if all(isinstance(prompt, str) for prompt in given):
        return tuple(TextPrompt(prompt, adds_special) for prompt in given)
    return tuple(_token_prompt(prompt, vocab_size) for prompt in given)


def _token_prompt(token_ids: Any, vocab_size: int) -> TokenPrompt:
    if not isinstance(token_ids, list) or not token_ids:
        raise _wrong_prompt()
    if not are_token_ids(token_ids, vocab_size):
        raise InvalidRequest(
            f"Each token id of 'prompt' must be an integer from 0 to {vocab_size - 1}.", param="prompt"
        )
    return TokenPrompt(tuple(token_ids))


def _wrong_prompt() -> InvalidRequest:
    return InvalidRequest(
        "'prompt' must be a string, a list of strings, a list of token ids, or a list of lists of token ids; "
        "lists must not be empty.",
        param="prompt",
    )
