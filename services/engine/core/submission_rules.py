"""Which requests can never be served."""

from __future__ import annotations

from collections.abc import Callable

from libs.errors import ContextLengthExceeded, InvalidRequest, RequestNeverFits
from services.engine.core.request import Request
from services.engine.core.scheduler_config import SchedulerConfig

# Alternatives beside a token's log-probability at most: what one request adds to a step stays small.
MAX_LOGPROBS = 20


def refuse_unservable(request: Request, config: SchedulerConfig, num_blocks_for: Callable[[int], int]) -> None:
    """Raise for a request that no state of the engine could serve.

    Raises:
        InvalidRequest: it asks for nothing, or for more than there are limits for.
        ContextLengthExceeded: prompt and output do not fit into the model's context.
        RequestNeverFits: they need more blocks than there are.
    """
    criteria = request.stop_criteria
    num_prompt_tokens = len(request.prompt_token_ids)
    num_prior = max((len(choice) for choice in request.choices), default=0)
    if not num_prompt_tokens:
        raise InvalidRequest("The prompt has no tokens; send at least one.", param="prompt_token_ids")
    if not request.choices:
        raise InvalidRequest("The request asks for no choices; ask for at least one.", param="choices")
    if len(set(request.choice_indices)) < len(request.choice_indices):
        raise InvalidRequest("Two choices have the same choice_index; each needs its own.", param="choices")
    if criteria.max_output_tokens <= num_prior:
        raise InvalidRequest(
            f"max_output_tokens is {criteria.max_output_tokens} and {num_prior} tokens were emitted already.",
            param="max_output_tokens",
        )
    max_num_tokens = num_prompt_tokens + criteria.max_output_tokens
    if max_num_tokens > config.max_model_len:
        raise ContextLengthExceeded.of(
            num_prompt_tokens=num_prompt_tokens,
            max_output_tokens=criteria.max_output_tokens,
            max_model_len=config.max_model_len,
        )
    if num_blocks_for(max_num_tokens) > config.num_blocks:
        raise RequestNeverFits(
            f"The request may grow to {max_num_tokens} tokens, but the KV cache holds "
            f"{config.num_blocks * config.block_size}. Shorten the prompt or lower the output limit."
        )
    for param, count in (
        ("num_logprobs", request.num_logprobs),
        ("num_prompt_logprobs", request.num_prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidRequest(f"{param} must be from 0 to {MAX_LOGPROBS}, not {count}.", param=param)
    if len(request.choices) > config.max_waiting_sequences:
        raise InvalidRequest(
            f"The request asks for {len(request.choices)} choices; this engine takes "
            f"{config.max_waiting_sequences} at most.",
            param="choices",
        )
