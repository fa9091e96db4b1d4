"""Limits and policies of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Batching(StrEnum):
    """How sequences join those that run."""

    CONTINUOUS = "continuous"
    STATIC = "static"


class Layout(StrEnum):
    """How blocks are given to a sequence."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


class Admission(StrEnum):
    """What must fit before a request joins those that run."""

    PREDICTED_PEAK = "predicted_peak"
    WATERMARK = "watermark"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How drafts are found by n-gram, how many of them a sequence computes in a step, and beside how many others.

    While more than ``max_drafting_seqs`` sequences run nobody drafts: a step is busy with them then.

    Raises:
        ValueError: for limits that contradict each other.
    """

    num_draft_tokens: int = 4
    min_ngram_tokens: int = 2
    max_ngram_tokens: int = 4
    max_drafting_seqs: int = 16

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "min_ngram_tokens", "max_drafting_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.max_ngram_tokens < self.min_ngram_tokens:
            raise ValueError(
                f"max_ngram_tokens must be at least min_ngram_tokens, which is {self.min_ngram_tokens}, "
                f"not {self.max_ngram_tokens}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of the core. Tokens, sequences and blocks are counts.

    ``aging_seconds`` is the head start that one level of priority gives; zero serves in order of arrival.
    ``target_itl_seconds`` bounds the predicted time of a step while somebody decodes. ``max_steps_in_flight`` of 2
    lets a step be sent while the one before it is computed. Static batching and the contiguous layout are baselines
    for measurements. Without ``speculation`` no drafts are computed.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting_sequences: int
    eos_token_ids: tuple[int, ...]
    enable_prefix_caching: bool = True
    watermark_fraction: float = 0.01
    aging_seconds: float = 30.0
    target_itl_seconds: float | None = None
    max_prefill_share: float = 0.34
    max_steps_in_flight: int = 1
    admission: Admission = Admission.PREDICTED_PEAK
    batching: Batching = Batching.CONTINUOUS
    layout: Layout = Layout.PAGED
    speculation: SpeculationConfig | None = None
