"""What an endpoint that generates is made of: how its body is read, and the shape of its answers.

A new dialect is one more ``Endpoint``; admission, placement, streaming and accounts are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from libs.text import Tokenizer
from services.gateway.answer_format import AnswerFormat, AnswerHead
from services.gateway.anthropic_answers import MessageFormat
from services.gateway.anthropic_schema import ValidMessages, parse_messages
from services.gateway.generation_fields import TEXT_MAX_TOKENS
from services.gateway.generation_options import GenerationOptions
from services.gateway.logprob_shapes import LogprobShapes
from services.gateway.openai_answers import ChatFormat
from services.gateway.openai_schema import ModelFacts, ValidChatCompletion, parse_chat_completion
from services.gateway.openai_text_answers import TextFormat
from services.gateway.openai_text_schema import ValidTextCompletion, parse_text_completion
from services.gateway.prompts import Prompt
from services.gateway.responses_answers import RESPONSE_ID_PREFIX, ResponseFormat
from services.gateway.responses_schema import ValidResponse, parse_response
from services.gateway.text_preparation import PreparedPrompt


class ValidRequest(Protocol):
    """A request in which every value can be served."""

    @property
    def model(self) -> str:
        """The name by which the client asked for the model."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """What is to be answered; each gets ``options.num_choices`` choices."""

    @property
    def options(self) -> GenerationOptions:
        """How."""


Request = TypeVar("Request", bound=ValidRequest)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Request]):
    """One way to ask for text."""

    answer_id_prefix: str
    prompt_field: str
    # The output limit of requests that name none; None leaves it to the operator.
    default_max_tokens: int | None
    parse: Callable[[Mapping[str, Any], ModelFacts], Request]
    new_format: Callable[[Request, AnswerHead, Sequence[PreparedPrompt], Tokenizer], AnswerFormat]
    # What OpenTelemetry's conventions for generative AI call it.
    operation: str = "chat"


def _chat_format(
    request: ValidChatCompletion, head: AnswerHead, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer
) -> AnswerFormat:
    return ChatFormat(head, request.options, prompts[0], LogprobShapes(tokenizer))


def _text_format(
    request: ValidTextCompletion, head: AnswerHead, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer
) -> AnswerFormat:
    return TextFormat(head, request.options, prompts, LogprobShapes(tokenizer))


def _message_format(
    request: ValidMessages, head: AnswerHead, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer
) -> AnswerFormat:
    return MessageFormat(head, prompts[0])


def _response_format(
    request: ValidResponse, head: AnswerHead, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer
) -> AnswerFormat:
    return ResponseFormat(head, request.body, LogprobShapes(tokenizer))


CHAT: Final = Endpoint("chatcmpl-", "messages", None, parse_chat_completion, _chat_format)
TEXT: Final = Endpoint(
    "cmpl-", "prompt", TEXT_MAX_TOKENS.default, parse_text_completion, _text_format, "text_completion"
)
MESSAGES: Final = Endpoint("msg_", "messages", None, parse_messages, _message_format)
RESPONSES: Final = Endpoint(RESPONSE_ID_PREFIX, "input", None, parse_response, _response_format)
