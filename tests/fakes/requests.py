"""Requests with few words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.engine.core.request import Request, StopCriteria
from services.engine.core.request import Sequence as EngineSequence
from tests.fakes.kv_worker import WantedLogprobs


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    *,
    owner: int = 1,
    max_output_tokens: int = 4,
    min_output_tokens: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
    tenant_id: str = "",
    priority: int = 0,
    cache_salt: bytes = b"",
    deadline: float | None = None,
    prior_outputs: Sequence[Sequence[int]] = ((),),
    choice_indices: tuple[int, ...] = (),
    sampling_params: object = None,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
) -> Request:
    """Build a request; ``prior_outputs`` has one entry for each choice."""
    return Request(
        request_id=request_id,
        owner=owner,
        prompt_token_ids=np.array(prompt_token_ids, np.uint32),
        stop_criteria=StopCriteria(
            max_output_tokens=max_output_tokens,
            min_output_tokens=min_output_tokens,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        ),
        sampling_params=sampling_params or WantedLogprobs(num_logprobs, num_prompt_logprobs),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        tenant_id=tenant_id,
        priority=priority,
        cache_salt=cache_salt,
        deadline=deadline,
        choices=tuple(np.array(output, np.uint32) for output in prior_outputs),
        choice_indices=choice_indices,
    )


def make_sequence(
    handle: int,
    token_ids: Sequence[int],
    *,
    request: Request | None = None,
    priority: int = 0,
    cache_salt: bytes = b"",
    deadline: float | None = None,
) -> EngineSequence:
    """Build the only choice of a request that came at time zero, with ``handle`` as its place of arrival."""
    request = request or make_request(
        f"r{handle}", token_ids, priority=priority, cache_salt=cache_salt, deadline=deadline
    )
    return EngineSequence(
        request=request,
        handle=handle,
        choice_index=0,
        arrival_number=handle,
        arrival_time=0.0,
        token_ids=np.array(token_ids, np.uint32),
        num_prior_output_tokens=0,
        place_time=-float(request.priority),
    )
