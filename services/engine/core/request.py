"""What is asked of the engine, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from libs.errors import OctavoError
from libs.kv import PrefixHash, SharedPrefix
from services.engine.core.timings import FirstToken, Stall, Timings

TokenIds = npt.NDArray[np.uint32]


class FinishReason(StrEnum):
    """Why an output ended well."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCriteria:
    """When an output ends; counts are output tokens, those emitted before a resume included."""

    max_output_tokens: int
    min_output_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with its parameters.

    ``sampling_params`` is opaque here: it is handed to the workers with each new sequence, and takes
    ``num_params_bytes`` of a message. ``owner`` is the stream
    that asked, ``deadline`` a point on the caller's clock. ``choices`` holds, for each choice, the output ids that
    were emitted elsewhere before this engine took over, and ``choice_indices`` their places among all that were
    asked for; empty where these are all. ``num_logprobs`` and ``num_prompt_logprobs`` are the
    alternatives beside the log-probabilities of output and prompt tokens; None wants neither. With
    ``stall_bound_seconds`` timings are kept: every gap between two tokens that is longer is told, and how long the
    first token took since ``received_time`` on the caller's clock. ``traceparent`` is the W3C trace context of
    whoever asked.
    """

    request_id: str
    owner: int
    prompt_token_ids: TokenIds
    stop_criteria: StopCriteria
    sampling_params: object
    num_params_bytes: int = 0
    tenant_id: str = ""
    priority: int = 0
    cache_salt: bytes = b""
    shared_prefix: SharedPrefix | None = None
    deadline: float | None = None
    choices: tuple[TokenIds, ...] = field(default_factory=lambda: (np.empty(0, np.uint32),))
    choice_indices: tuple[int, ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    stall_bound_seconds: float | None = None
    received_time: float | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a sequence cost: tokens, and seconds on the caller's clock."""

    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_discarded_tokens: int
    num_preemptions: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    # The first gaps beyond the request's bound, and how many there were.
    stalls: tuple[Stall, ...] = ()
    num_stalls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnd:
    """The one end of a sequence: ``reason`` when it ended well, else ``error``."""

    handle: int
    owner: int
    request_id: str
    usage: Usage
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: OctavoError | None = None
    traceparent: str | None = None


@dataclass(slots=True)
class Sequence:
    """One choice of a request: everything that is touched only when something happens to it.

    What changes every step lives in the sequence table while the sequence has a slot. ``token_ids`` is prompt and
    output as known when it last had none. ``parent`` is the first choice of the same request, from whose blocks
    this one can fork. ``place_time`` is the arrival, moved to the front by the priority.
    """

    request: Request
    handle: int
    choice_index: int
    arrival_number: int
    arrival_time: float
    token_ids: TokenIds
    num_prior_output_tokens: int
    place_time: float
    parent: Sequence | None = None
    prefix_hashes: list[PrefixHash] = field(default_factory=list)
    slot: int | None = None
    num_cached_tokens: int | None = None
    num_computed_tokens_total: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    num_prompt_logprobs_reported: int = 0
    timings: Timings | None = None

    @property
    def order(self) -> tuple[float, int]:
        """Place in line. It never changes, so a preempted sequence keeps it and nobody starves."""
        return (self.place_time, self.arrival_number)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output together, at most."""
        return self.num_prompt_tokens + self.request.stop_criteria.max_output_tokens

    @property
    def num_prompt_logprobs_left(self) -> int:
        """Prompt tokens whose log-probabilities are still to be reported.

        They are reported once for a request, with its first choice; one that has output already has had them.
        """
        if self.request.num_prompt_logprobs is None or self.choice_index or self.num_prior_output_tokens:
            return 0
        return self.num_prompt_tokens - 1 - self.num_prompt_logprobs_reported

    def first_token(self) -> FirstToken:
        """Say how the first token came about, when it has come, of a sequence that asked for timings."""
        assert self.timings is not None, f"handle {self.handle} asked for no timings"
        assert self.first_scheduled_time is not None, f"handle {self.handle} was never scheduled"
        assert self.first_token_time is not None, f"handle {self.handle} has no token yet"
        received_time = self.request.received_time
        return FirstToken(
            handle=self.handle,
            owner=self.request.owner,
            queue_seconds=self.first_scheduled_time
            - (self.arrival_time if received_time is None else received_time),
            prefill_seconds=self.first_token_time - self.first_scheduled_time,
            num_cached_tokens=self.num_cached_tokens or 0,
            misses=self.timings.misses,
        )

    def usage(self, *, num_tokens: int, now: float, num_discarded_tokens: int = 0) -> Usage:
        """Sum up at the end, when ``num_tokens`` are known."""
        scheduled = now if self.first_scheduled_time is None else self.first_scheduled_time
        first_token = now if self.first_token_time is None else self.first_token_time
        return Usage(
            num_cached_tokens=self.num_cached_tokens or 0,
            num_computed_tokens=self.num_computed_tokens_total,
            num_output_tokens=num_tokens - self.num_prompt_tokens - self.num_prior_output_tokens,
            num_discarded_tokens=num_discarded_tokens,
            num_preemptions=self.num_preemptions,
            queue_seconds=scheduled - self.arrival_time,
            prefill_seconds=first_token - scheduled,
            decode_seconds=now - first_token,
            stalls=() if self.timings is None else tuple(self.timings.stalls),
            num_stalls=0 if self.timings is None else self.timings.num_stalls,
        )
