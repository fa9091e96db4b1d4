"""The types of answers, for ``/openapi.json``: tests hold every answer against them.

Owns the description alone. Answers are written by the formats of their endpoints, which are made for speed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Struct, forbid_unknown_fields=True):
    """What the answer's tokens were for."""

    reasoning_tokens: int


class Usage(Struct, forbid_unknown_fields=True):
    """OpenAI's counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # Left out when the engine could not tell it any more.
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    # Of a model that reasons.
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timings(Struct, forbid_unknown_fields=True):
    """Where the time of a request went, in microseconds: segments and what is left over add up to the wall's."""

    wall_us: int
    segments_us: dict[str, int]
    unattributed_us: int
    # Of segments that are zero, why.
    absent: dict[str, str]
    retries: int
    choices: list[dict[str, Any]]
    stalls: dict[str, Any] | None


class Alternative(Struct, forbid_unknown_fields=True):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, forbid_unknown_fields=True):
    """A token of an answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob]
    refusal: None


class PromptTokenLogprob(Struct, forbid_unknown_fields=True):
    """A token that stands in the prompt or could."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class CalledFunction(Struct, forbid_unknown_fields=True):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class AnswerToolCall(Struct, forbid_unknown_fields=True):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Struct, forbid_unknown_fields=True):
    """What the assistant says and calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(Struct, forbid_unknown_fields=True):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, forbid_unknown_fields=True):
    """The whole answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class FunctionDelta(Struct, forbid_unknown_fields=True):
    """The name with the first part of a call, then pieces of the arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct, forbid_unknown_fields=True):
    """A part of a call; id and type come with the first."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(Struct, forbid_unknown_fields=True):
    """What is new of a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, forbid_unknown_fields=True):
    """What is new of one of the answers; the reason comes with its last chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, forbid_unknown_fields=True):
    """The data of one event of a streamed answer to a conversation."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    # Only with stream_options; null before the last unless it is continuous.
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class TextLogprobs(Struct, forbid_unknown_fields=True):
    """Log-probabilities of a plain completion's tokens, each list with one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Struct, forbid_unknown_fields=True):
    """One of the completions."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(Struct, forbid_unknown_fields=True):
    """All completions of plain prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET


class TextChunkChoice(Struct, forbid_unknown_fields=True):
    """What is new of one of the completions; the reason comes with its last chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletionChunk(Struct, forbid_unknown_fields=True):
    """The data of one event of streamed completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class Model(Struct, forbid_unknown_fields=True):
    """The served model under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Struct, forbid_unknown_fields=True):
    """All names of the served model."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Struct, forbid_unknown_fields=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Struct, forbid_unknown_fields=True):
    """The text of tokens."""

    prompt: str


class TokenCount(Struct, forbid_unknown_fields=True):
    """Anthropic's count of a conversation's tokens."""

    input_tokens: int


class Status(Struct, forbid_unknown_fields=True):
    """What a probe says."""

    status: Literal["alive", "ready"]


class MessageUsage(Struct):
    """Anthropic's counts; input tokens are those that did not come from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class ContentBlock(Struct):
    """A part of a message, as Anthropic has it by its type."""

    type: str


class AnthropicMessage(Struct):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class NamedEvent(Struct):
    """The data of an event of a streamed message or response; its type is the event's name."""

    type: str


class ResponseUsage(Struct):
    """Counts of the Responses API."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseItem(Struct):
    """A part of a response, as OpenAI has it by its type."""

    id: str
    type: str
    status: Literal["in_progress", "completed", "incomplete"]


class Response(Struct):
    """OpenAI's response, which has what was asked for beside these."""

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[ResponseItem]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    usage: ResponseUsage | None


ANSWER_TYPES: tuple[type[msgspec.Struct], ...] = (
    ChatCompletion,
    ChatCompletionChunk,
    TextCompletion,
    TextCompletionChunk,
    Response,
    AnthropicMessage,
    NamedEvent,
    TokenCount,
    Tokens,
    Text,
    Model,
    ModelList,
    Status,
)
