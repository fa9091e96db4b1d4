"""The fields that say how to generate and need no more than a type, bounds and a default.

Owns the table. ``generation_options`` and the parsers of endpoints read requests with these objects, and
``openai_bodies`` describes requests with them.
"""

from __future__ import annotations

from typing import Final

from services.gateway.generation import MAX_CHOICES
from services.gateway.request_fields import BooleanField, IntegerField, NumberField, RequestField

MAX_LOGPROBS: Final = 20
MAX_PENALTY: Final = 2.0
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 10.0
MAX_PRIORITY: Final = 100
MAX_TEMPERATURE: Final = 2.0
MAX_TOKENS_BOUND: Final = 2**31 - 1
_MIN_SEED, _MAX_SEED = -(2**63), 2**63 - 1

NUM_CHOICES: Final = IntegerField("n", 1, MAX_CHOICES, "Answers to each prompt.", default=1)
TEMPERATURE: Final = NumberField(
    "temperature", 0.0, MAX_TEMPERATURE, 1.0, "Divides the logits before a draw; below 0.001 is greedy."
)
MIN_P: Final = NumberField(
    "min_p", 0.0, 1.0, 0.0, "Tokens less likely than this share of the likeliest's probability are not drawn."
)
SEED: Final = IntegerField("seed", _MIN_SEED, _MAX_SEED, "The same request with the same seed gets the same draws.")
PRESENCE_PENALTY: Final = NumberField(
    "presence_penalty",
    -MAX_PENALTY,
    MAX_PENALTY,
    0.0,
    "Taken from the logit of each token that the answer has already.",
)
FREQUENCY_PENALTY: Final = NumberField(
    "frequency_penalty",
    -MAX_PENALTY,
    MAX_PENALTY,
    0.0,
    "Taken from a token's logit for each time that the answer has it.",
)
REPETITION_PENALTY: Final = NumberField(
    "repetition_penalty",
    MIN_REPETITION_PENALTY,
    MAX_REPETITION_PENALTY,
    1.0,
    "Makes tokens of prompt and answer less likely above 1, and likelier below.",
)
MAX_TOKENS: Final = IntegerField(
    "max_tokens", 1, MAX_TOKENS_BOUND, "Longest answer, in tokens. Without it the room left, within a limit."
)
MAX_COMPLETION_TOKENS: Final = IntegerField(
    "max_completion_tokens",
    1,
    MAX_TOKENS_BOUND,
    "OpenAI's newer name of max_tokens; if both are given they are equal.",
)
TEXT_MAX_TOKENS: Final = IntegerField(
    "max_tokens",
    0,
    MAX_TOKENS_BOUND,
    "Longest answer, in tokens; 0 only with echo or prompt_logprobs, for the prompt alone.",
    # What OpenAI gives for a plain prompt where nothing is said.
    default=16,
)
MIN_TOKENS: Final = IntegerField(
    "min_tokens",
    0,
    MAX_TOKENS_BOUND,
    "Tokens before which neither an end token nor a stop string ends the answer; at most max_tokens.",
    default=0,
)
INCLUDE_STOP_STRING: Final = BooleanField(
    "include_stop_str_in_output", False, "The string or token that stopped the answer is part of it."
)
IGNORE_EOS: Final = BooleanField("ignore_eos", False, "The model's end tokens do not end the answer.")
SKIP_SPECIAL_TOKENS: Final = BooleanField(
    "skip_special_tokens", True, "Control tokens are no part of the answer's text."
)
PRIORITY: Final = IntegerField("priority", -MAX_PRIORITY, MAX_PRIORITY, "Lower is served earlier.", default=0)
ECHO: Final = BooleanField(
    "echo", False, "The answer begins with the prompt; in a conversation, with the assistant's last message."
)
STREAM: Final = BooleanField("stream", False, "Answer with server-sent events.")
RETURN_TOKEN_IDS: Final = BooleanField(
    "return_token_ids", False, "Show prompt_token_ids, and token_ids in each choice."
)
TIMINGS: Final = BooleanField("timings", False, "Show where the time went, in the body or the last chunk.")
PROMPT_LOGPROBS: Final = IntegerField(
    "prompt_logprobs", 0, MAX_LOGPROBS, "Likeliest tokens beside each token of the prompt; not with stream."
)
LOGPROBS: Final = BooleanField("logprobs", False, "Show the log-probability of each token of the answer.")
TOP_LOGPROBS: Final = IntegerField(
    "top_logprobs", 0, MAX_LOGPROBS, "Likeliest tokens beside each token of the answer; needs logprobs.", default=0
)
TEXT_LOGPROBS: Final = IntegerField(
    "logprobs", 0, MAX_LOGPROBS, "Likeliest tokens beside each token, of the prompt too where it is echoed."
)
ADD_SPECIAL_TOKENS: Final = BooleanField(
    "add_special_tokens", True, "Put the tokens before a text that the model's tokenizer puts there."
)
CONTINUE_FINAL_MESSAGE: Final = BooleanField(
    "continue_final_message", False, "The answer goes on with the last message, which must be the assistant's."
)
PARALLEL_TOOL_CALLS: Final = BooleanField(
    "parallel_tool_calls", True, "Whether an answer may call more than one tool."
)
INCLUDE_REASONING: Final = BooleanField("include_reasoning", True, "Show the reasoning beside the answer.")
THINKING_TOKEN_BUDGET: Final = IntegerField(
    "thinking_token_budget",
    1,
    MAX_TOKENS_BOUND,
    "Longest reasoning, in tokens; null where the model cannot be held to it.",
)
RETURN_TOKEN_STRINGS: Final = BooleanField(
    "return_token_strs", False, "Show the names of the tokens in the vocabulary."
)
INCLUDE_USAGE: Final = BooleanField("include_usage", False, "A last chunk has the counts.")
CONTINUOUS_USAGE: Final = BooleanField(
    "continuous_usage_stats", False, "Every chunk has the counts so far, of all choices together."
)

# What all of OpenAI's generating endpoints have.
SHARED_FIELDS: Final[tuple[RequestField, ...]] = (
    NUM_CHOICES,
    TEMPERATURE,
    MIN_P,
    SEED,
    PRESENCE_PENALTY,
    FREQUENCY_PENALTY,
    REPETITION_PENALTY,
    MIN_TOKENS,
    INCLUDE_STOP_STRING,
    IGNORE_EOS,
    SKIP_SPECIAL_TOKENS,
    PRIORITY,
    ECHO,
    STREAM,
    RETURN_TOKEN_IDS,
    TIMINGS,
    PROMPT_LOGPROBS,
)
