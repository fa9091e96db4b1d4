"""What a request says of how to generate, whatever its prompt is: sampling, limits, ends, the form of the answer.

Owns the meaning, the type and the bounds of these fields, which all of OpenAI's generating endpoints share. It must
not know prompts, HTTP or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from libs.errors import InvalidRequest
from services.gateway.generation_fields import (
    CONTINUOUS_USAGE,
    ECHO,
    FREQUENCY_PENALTY,
    IGNORE_EOS,
    INCLUDE_STOP_STRING,
    INCLUDE_USAGE,
    MAX_TOKENS_BOUND,
    MIN_P,
    MIN_TOKENS,
    NUM_CHOICES,
    PRESENCE_PENALTY,
    PRIORITY,
    PROMPT_LOGPROBS,
    REPETITION_PENALTY,
    RETURN_TOKEN_IDS,
    SEED,
    SKIP_SPECIAL_TOKENS,
    STREAM,
    TEMPERATURE,
    TIMINGS,
)
from services.gateway.openai_fields import check_stream_options
from services.gateway.openai_values import is_number, read_integer, read_number, read_token_ids
from services.gateway.output_constraints import OutputConstraint, parse_output_constraint
from services.gateway.tools import ToolUse

MAX_STOP_STRINGS: Final = 4
MAX_STOP_STRING_CHARACTERS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 64
MAX_BAD_WORD_CHARACTERS: Final = 256
# Log-probabilities of one request in all: so much is kept until the answer is written. It is what 128 prompts of
# 2,048 tokens need that are scored with one alternative each.
MAX_TOTAL_LOGPROBS: Final = 2**19
MAX_USER_CHARACTERS: Final = 256
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARACTERS: Final = 64
MAX_METADATA_VALUE_CHARACTERS: Final = 512
# Lower temperatures are greedy.
MIN_SAMPLED_TEMPERATURE: Final = 0.001
# ``truncate_prompt_tokens`` with this value keeps what fits beside the output.
TRUNCATE_TO_FIT: Final = -1
_NO_DEFAULTS: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to generate and how to answer; every value can be served."""

    num_choices: int
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    # The client's seed as the engine wants it; None lets the gateway draw one.
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    # What the answer is held to.
    constraint: OutputConstraint | None
    # None means: as much as the endpoint gives unasked. 0 means that only the prompt is of interest.
    max_output_tokens: int | None
    min_output_tokens: int
    stop_strings: tuple[str, ...]
    includes_stop_string: bool
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    skips_special_tokens: bool
    # The last so many tokens of the prompt are kept, or what fits.
    truncate_prompt_tokens: int | None
    # As engines want it: higher is earlier.
    priority: int
    is_streaming: bool
    includes_usage: bool
    has_continuous_usage: bool
    returns_token_ids: bool
    # The answer ends with its latency receipt.
    returns_timings: bool
    # Alternatives to show beside each token's own log-probability: in the answer, and of the prompt in a field of
    # its own or where it is echoed. None shows nothing.
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    num_echoed_logprobs: int | None
    # The answer begins with the prompt's text; in a conversation, with the assistant's last message.
    echoes_prompt: bool
    # Recorded in the log only.
    user: str | None
    metadata: Mapping[str, str]
    # What may be called.
    tools: ToolUse | None = None
    # Reasoning is told apart from the answer, and shown; its limit in tokens.
    reads_reasoning: bool = False
    shows_reasoning: bool = True
    max_reasoning_tokens: int | None = None

    @property
    def tool_names(self) -> frozenset[str]:
        """The names of the functions that may be called."""
        return frozenset() if self.tools is None else self.tools.names

    @property
    def num_measured_prompt_logprobs(self) -> int | None:
        """Alternatives of prompt tokens that an engine must report."""
        wanted = [count for count in (self.num_prompt_logprobs, self.num_echoed_logprobs) if count is not None]
        return max(wanted, default=None)


def parse_generation_options(
    body: Mapping[str, Any],
    *,
    vocab_size: int,
    max_output_tokens: int | None,
    num_logprobs: int | None = None,
    num_echoed_logprobs: int | None = None,
    defaults: Mapping[str, Any] = _NO_DEFAULTS,
) -> GenerationOptions:
    """Check the fields and return their values, with those that go by another name or type at each endpoint.

    ``defaults`` are values of fields that the body leaves out; null counts as left out.

    Raises:
        InvalidRequest: a value that cannot be served; names the field.
    """
    body = with_defaults(body, defaults)
    is_streaming = STREAM.read(body)
    stream_options = _stream_options(body, is_streaming=is_streaming)
    return GenerationOptions(
        num_choices=NUM_CHOICES.read(body) or 1,
        temperature=_temperature(body),
        top_p=_top_p(body),
        top_k=_top_k(body, vocab_size),
        min_p=MIN_P.read(body) or None,
        seed=_seed(body),
        presence_penalty=PRESENCE_PENALTY.read(body),
        frequency_penalty=FREQUENCY_PENALTY.read(body),
        repetition_penalty=_repetition_penalty(body),
        logit_bias=_logit_bias(body, vocab_size),
        allowed_token_ids=_allowed_token_ids(body, vocab_size),
        bad_words=_bad_words(body),
        constraint=parse_output_constraint(body),
        max_output_tokens=max_output_tokens,
        min_output_tokens=_min_output_tokens(body, max_output_tokens),
        stop_strings=_stop_strings(body),
        includes_stop_string=INCLUDE_STOP_STRING.read(body),
        stop_token_ids=read_token_ids(body, "stop_token_ids", max_count=MAX_STOP_TOKEN_IDS, vocab_size=vocab_size),
        ignore_eos=IGNORE_EOS.read(body),
        skips_special_tokens=SKIP_SPECIAL_TOKENS.read(body),
        truncate_prompt_tokens=_truncate_prompt_tokens(body),
        priority=_priority(body),
        is_streaming=is_streaming,
        includes_usage=INCLUDE_USAGE.read(stream_options, "stream_options."),
        has_continuous_usage=CONTINUOUS_USAGE.read(stream_options, "stream_options."),
        returns_token_ids=RETURN_TOKEN_IDS.read(body),
        returns_timings=TIMINGS.read(body),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=_num_prompt_logprobs(body, is_streaming=is_streaming),
        num_echoed_logprobs=num_echoed_logprobs,
        echoes_prompt=ECHO.read(body),
        user=_user(body),
        metadata=_metadata(body),
    )


def with_defaults(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body with a default for each field that it leaves out or that is null."""
    missing = {name: value for name, value in defaults.items() if body.get(name) is None}
    return {**body, **missing} if missing else body


def check_total_logprobs(options: GenerationOptions, *, num_prompt_tokens: int, max_output_tokens: int) -> None:
    """Refuse a request that may come to more log-probabilities than are kept; counts are of all prompts together.

    Raises:
        InvalidRequest: there may be too many.
    """
    measured = (
        (options.num_logprobs, max_output_tokens),
        (options.num_measured_prompt_logprobs, num_prompt_tokens),
    )
    counts = [num_tokens * (count + 1) for count, num_tokens in measured if count is not None]
    total = options.num_choices * sum(counts)
    if total > MAX_TOTAL_LOGPROBS:
        raise InvalidRequest(
            f"The request may come to {total} log-probabilities; this server keeps {MAX_TOTAL_LOGPROBS} for one. "
            "Ask for fewer alternatives, choices, prompts or tokens.",
            param="prompt_logprobs" if options.num_logprobs is None else "logprobs",
        )


def _num_prompt_logprobs(body: Mapping[str, Any], *, is_streaming: bool) -> int | None:
    count = PROMPT_LOGPROBS.read(body)
    if count is not None and is_streaming:
        raise InvalidRequest("'prompt_logprobs' is not available with 'stream': true.", param="prompt_logprobs")
    return count


def _repetition_penalty(body: Mapping[str, Any]) -> float | None:
    penalty = REPETITION_PENALTY.read(body)
    return None if penalty == 1.0 else penalty


def _logit_bias(body: Mapping[str, Any], vocab_size: int) -> Mapping[int, float]:
    biases = body.get("logit_bias")
    if biases is None:
        return {}
    if not isinstance(biases, dict) or len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"'logit_bias' must be an object of at most {MAX_LOGIT_BIASES} token ids.", param="logit_bias"
        )
    return {_biased_token_id(key, vocab_size): _bias(value) for key, value in biases.items()}


def _biased_token_id(key: str, vocab_size: int) -> int:
    # Plain decimal digits only: int() would take other spellings of one id, of which one would then win.
    token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= len(str(vocab_size)) else vocab_size
    if token_id >= vocab_size or str(token_id) != key:
        raise InvalidRequest(
            f"Each key of 'logit_bias' must be a token id from 0 to {vocab_size - 1} in digits.", param="logit_bias"
        )
    return token_id


def _bias(value: Any) -> float:
    if not is_number(value) or abs(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"Each value of 'logit_bias' must be a number from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}.",
            param="logit_bias",
        )
    return float(value)


def _allowed_token_ids(body: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    if body.get("allowed_token_ids") == []:
        raise InvalidRequest("'allowed_token_ids' must hold at least one token id.", param="allowed_token_ids")
    return read_token_ids(body, "allowed_token_ids", max_count=MAX_ALLOWED_TOKEN_IDS, vocab_size=vocab_size)


def _bad_words(body: Mapping[str, Any]) -> tuple[str, ...]:
    words = body.get("bad_words")
    if words is None:
        return ()
    if not isinstance(words, list) or len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"'bad_words' must be a list of at most {MAX_BAD_WORDS} strings.", param="bad_words")
    if not all(isinstance(word, str) and 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS for word in words):
        raise InvalidRequest(
            f"Each of 'bad_words' must be a string of 1 to {MAX_BAD_WORD_CHARACTERS} characters.", param="bad_words"
        )
    return tuple(dict.fromkeys(words))


def _truncate_prompt_tokens(body: Mapping[str, Any]) -> int | None:
    count = read_integer(body, "truncate_prompt_tokens", low=TRUNCATE_TO_FIT, high=MAX_TOKENS_BOUND)
    if count == 0:
        raise InvalidRequest(
            "'truncate_prompt_tokens' must be at least 1, or -1 to keep what fits.", param="truncate_prompt_tokens"
        )
    return count


def _priority(body: Mapping[str, Any]) -> int:
    """Return the priority as engines count it; for clients, as in vLLM, lower is earlier."""
    return -(PRIORITY.read(body) or 0)


def _stream_options(body: Mapping[str, Any], *, is_streaming: bool) -> Mapping[str, Any]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not is_streaming:
        raise InvalidRequest("'stream_options' is allowed only with 'stream': true.", param="stream_options")
    if not isinstance(options, dict):
        raise InvalidRequest("'stream_options' must be an object.", param="stream_options")
    check_stream_options(options)
    return options


def _temperature(body: Mapping[str, Any]) -> float:
    temperature = TEMPERATURE.read(body)
    # So low, a draw differs from the likeliest token only where two logits are equal, by chance.
    return 0.0 if temperature < MIN_SAMPLED_TEMPERATURE else temperature


def _top_p(body: Mapping[str, Any]) -> float | None:
    top_p = read_number(body, "top_p", default=1.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise InvalidRequest("'top_p' must be greater than 0 and at most 1.", param="top_p")
    return None if top_p == 1.0 else top_p


def _top_k(body: Mapping[str, Any], vocab_size: int) -> int | None:
    """Return how many tokens to keep; -1 and 0 keep all, as in vLLM and SGLang."""
    top_k = read_integer(body, "top_k", low=-1, high=vocab_size)
    return None if top_k in (None, -1, 0) else top_k


def _seed(body: Mapping[str, Any]) -> int | None:
    seed = SEED.read(body)
    # The engine's seed is unsigned; two's complement keeps different seeds different.
    return None if seed is None else seed % 2**64


def _min_output_tokens(body: Mapping[str, Any], max_output_tokens: int | None) -> int:
    min_tokens = MIN_TOKENS.read(body) or 0
    if max_output_tokens is not None and min_tokens > max_output_tokens:
        raise InvalidRequest("'min_tokens' must not be greater than 'max_tokens'.", param="min_tokens")
    return min_tokens


def _stop_strings(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if isinstance(strings, list) and len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"'stop' takes at most {MAX_STOP_STRINGS} strings.", param="stop")
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise InvalidRequest("'stop' must be a string or a list of strings.", param="stop")
    if not all(1 <= len(string) <= MAX_STOP_STRING_CHARACTERS for string in strings):
        raise InvalidRequest(
            f"Each string of 'stop' must have 1 to {MAX_STOP_STRING_CHARACTERS} characters.", param="stop"
        )
    return tuple(dict.fromkeys(strings))


def _user(body: Mapping[str, Any]) -> str | None:
    """Return who the client says that its user is; ``safety_identifier`` is OpenAI's newer name for ``user``."""
    found: str | None = None
    for name in ("user", "safety_identifier"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > MAX_USER_CHARACTERS:
            raise InvalidRequest(
                f"'{name}' must be a string of at most {MAX_USER_CHARACTERS} characters.", param=name
            )
        if found is not None and value != found:
            raise InvalidRequest("'user' and 'safety_identifier' differ; give one of them.", param=name)
        found = value
    return found


def _metadata(body: Mapping[str, Any]) -> Mapping[str, str]:
    metadata = body.get("metadata")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA_PAIRS:
        raise InvalidRequest(
            f"'metadata' must be an object with at most {MAX_METADATA_PAIRS} pairs.", param="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARACTERS or not isinstance(value, str):
            raise InvalidRequest("'metadata' must map short names to strings.", param="metadata")
        if len(value) > MAX_METADATA_VALUE_CHARACTERS:
            raise InvalidRequest(
                f"A value of 'metadata' is longer than {MAX_METADATA_VALUE_CHARACTERS} characters.",
                param="metadata",
            )
    return metadata
