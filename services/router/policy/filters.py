"""Filters: which engines may take a request at all. Pure.

Filters are applied in order. The one that drops the last engine says what is short, and so whether the request
must wait or can never be served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.router.policy.facts import EngineFacts, EngineState, PlacementRequest


class Shortage(StrEnum):
    """Why no engine is left."""

    MODEL_NOT_SERVED = "model_not_served"
    NO_ENGINE = "no_engine"
    CONTRACT_DIFFERS = "contract_differs"
    PROMPT_TOO_LONG = "prompt_too_long"
    NO_ROOM = "no_room"


class Filter(Protocol):
    """Drops engines that cannot take a request."""

    @property
    def shortage(self) -> Shortage:
        """What it means when this filter drops the last engine."""

    def admits(self, engine: EngineFacts, request: PlacementRequest) -> bool:
        """Tell whether the engine stays."""


@dataclass(frozen=True, slots=True)
class FilterResult:
    """The engines that are left, or what is short."""

    engines: tuple[EngineFacts, ...]
    shortage: Shortage | None


@dataclass(frozen=True, slots=True)
class ServesModel:
    """Keeps engines of the request's model."""

    shortage: Shortage = Shortage.MODEL_NOT_SERVED

    def admits(self, engine: EngineFacts, request: PlacementRequest) -> bool:
        """Compare public model names."""
        return engine.identity.model_name == request.model_name


@dataclass(frozen=True, slots=True)
class IsAlive:
    """Keeps engines whose current incarnation is watched."""

    shortage: Shortage = Shortage.NO_ENGINE

    def admits(self, engine: EngineFacts, request: PlacementRequest) -> bool:
        """Fence what is not watched and what has a successor."""
        return engine.is_watched and engine.is_current


@dataclass(frozen=True, slots=True)
class IsReady:
    """Keeps engines that take requests."""

    shortage: Shortage = Shortage.NO_ENGINE

    def admits(self, engine: EngineFacts, request: PlacementRequest) -> bool:
        """Drop what is starting or draining."""
        return engine.state is EngineState.READY and engine.identity.capacity is not None


@dataclass(frozen=True, slots=True)
class SharesHashContract:
    """Keeps engines whose prefix hashes mean the same as the request's.

    With another contract every prefix would silently miss, or worse, the tokenizers differ.
    """

    shortage: Shortage = Shortage.CONTRACT_DIFFERS

    def admits(self, engine: EngineFacts, request: PlacementRequest) -> bool:
        """Compare block size, algorithm and tokenizer."""
        return request.hash_contract is None or engine.identity.hash_contract == request.hash_contract


@dataclass(frozen=True, slots=True)
class FitsPrompt:
    """Keeps engines whose context holds the prompt and one output token."""

    shortage: Shortage = Shortage.PROMPT_TOO_LONG

    def admits(self, engine: EngineFacts, request: PlacementRequest) -> bool:
        """Compare with the engine's context length."""
        capacity = engine.identity.capacity
        return capacity is not None and request.num_prompt_tokens < capacity.max_model_len


@dataclass(frozen=True, slots=True)
class IsNotExcluded:
    """Keeps engines that did not just fail this request."""

    shortage: Shortage = Shortage.NO_ENGINE

    def admits(self, engine: EngineFacts, request: PlacementRequest) -> bool:
        """Look the engine up among the excluded."""
        return engine.engine_id not in request.excluded_engine_ids


@dataclass(frozen=True, slots=True)
class HasRoom:
    """Keeps engines with little waiting, so that the queue that matters is the router's.

    Args:
        max_waiting_steps: waiting prompt tokens at most, in token budgets of a step.
        max_requests_ratio: requests there at most, as a multiple of what the engine runs at once.
    """

    max_waiting_steps: float
    max_requests_ratio: float
    shortage: Shortage = Shortage.NO_ROOM

    def admits(self, engine: EngineFacts, request: PlacementRequest) -> bool:
        """Compare what waits there, without this request, so that a long prompt can never starve."""
        capacity = engine.identity.capacity
        if capacity is None:
            return False
        max_waiting_tokens = self.max_waiting_steps * capacity.max_num_batched_tokens
        max_requests = max(capacity.max_num_seqs + 1, self.max_requests_ratio * capacity.max_num_seqs)
        return engine.num_waiting_tokens < max_waiting_tokens and engine.num_requests < max_requests


def filter_engines(
    filters: Sequence[Filter], engines: Sequence[EngineFacts], request: PlacementRequest
) -> FilterResult:
    """Apply filters in order; stop at the one that drops the last engine."""
    remaining = tuple(engines)
    for engine_filter in filters:
        remaining = tuple(engine for engine in remaining if engine_filter.admits(engine, request))
        if not remaining:
            return FilterResult((), engine_filter.shortage)
    return FilterResult(remaining, None)
