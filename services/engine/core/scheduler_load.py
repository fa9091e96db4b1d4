"""What the scheduler says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """How busy the core is."""

    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    num_available_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Token slots in the block tables of running sequences, and how many hold a computed token."""

    num_allocated_tokens: int
    num_computed_tokens: int
