"""What a step is: the scheduler's decision, the workers' result, and what follows for the requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.errors import OctavoError
from services.engine.core.kv_cache_manager import BlockCopy
from services.engine.core.logprobs import HandleLogprobs, SlotLogprobs, SlotPromptLogprobs
from services.engine.core.request import SequenceEnd, TokenIds
from services.engine.core.sequence_table import Slots
from services.engine.core.step_cost import StepWork
from services.engine.core.timings import FirstToken


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the workers do not know yet, with the blocks of its prefix hit.

    ``is_resumed`` says that they did know it once, before it was preempted; ``wants_prompt_logprobs`` that its
    prompt's log-probabilities are still to be reported.
    """

    slot: int
    token_ids: TokenIds
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    sampling_params: object
    choice_index: int
    is_resumed: bool = False
    wants_prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepDrafts:
    """The drafts that a step computes behind known tokens: ``num_tokens[i]`` of its i-th sequence."""

    num_tokens: npt.NDArray[np.int64]
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step, as a difference to what the workers know.

    The arrays have one entry for each scheduled sequence; ``new_block_ids`` holds ``num_new_blocks[i]`` ids for the
    i-th. ``is_sampled`` marks those whose last known token is computed in this step. ``handles``
    tell later whether a slot still belongs to the same sequence; ``num_computed_tokens`` is what each will have
    computed when the step has ended. ``block_copies`` happen before anything is computed. ``drafts`` are the last
    of the ``num_scheduled_tokens``, but not counted as computed until they are accepted; None when there are none.
    """

    step_id: int
    ended_slots: tuple[int, ...]
    new_sequences: tuple[NewSequence, ...]
    slots: Slots
    num_scheduled_tokens: npt.NDArray[np.int64]
    num_new_blocks: npt.NDArray[np.int64]
    new_block_ids: npt.NDArray[np.int32]
    is_sampled: npt.NDArray[np.bool_]
    handles: npt.NDArray[np.uint32]
    num_computed_tokens: npt.NDArray[np.int64]
    block_copies: tuple[BlockCopy, ...]
    work: StepWork
    drafts: StepDrafts | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return self.work.num_tokens

    @property
    def num_known_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens that each sequence computes without its drafts."""
        return self.num_scheduled_tokens - (self.drafts.num_tokens if self.drafts is not None else 0)

    @property
    def num_draft_tokens(self) -> int:
        """How many of them are drafts."""
        return len(self.drafts.token_ids) if self.drafts is not None else 0


@dataclass(frozen=True, slots=True)
class SlotFailure:
    """A sequence that could not go on in a step, and why."""

    slot: int
    error: OctavoError


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the workers made of a step: ``num_tokens[i]`` of ``token_ids`` for each sampled slot, in its order.

    These are the accepted drafts and the token that was sampled after them. Those in ``failures`` gave none.
    Log-probabilities are None when the workers measured none.
    """

    step_id: int
    slots: Slots
    num_tokens: npt.NDArray[np.int64]
    token_ids: TokenIds
    failures: tuple[SlotFailure, ...]
    step_seconds: float
    output_logprobs: SlotLogprobs | None = None
    prompt_logprobs: SlotPromptLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """What a step brought to those that are still there: ``slots[i]`` got ``num_tokens[i]`` of ``token_ids``.

    ``num_known_tokens`` is what each of them has then. ``num_computed_tokens`` has an entry for each sequence of
    the step, as the step's own, with the accepted drafts.
    """

    slots: Slots
    num_tokens: npt.NDArray[np.int64]
    token_ids: TokenIds
    last_token_ids: TokenIds
    num_known_tokens: npt.NDArray[np.int64]
    num_computed_tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageTableRow:
    """Where one computed token of a sequence lies, and how many block tables list its block."""

    handle: int
    logical_token_index: int
    physical_block_id: int
    reference_count: int


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a step did for requests: arrays by sequence that got tokens, objects for ends.

    ``handles[i]`` got ``num_tokens[i]`` of ``token_ids``, in order.
    """

    step_id: int
    handles: npt.NDArray[np.uint32]
    owners: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    token_ids: TokenIds
    ends: tuple[SequenceEnd, ...]
    output_logprobs: HandleLogprobs | None = None
    prompt_logprobs: HandleLogprobs | None = None
    # Of the sequences that asked for timings and got their first token.
    first_tokens: tuple[FirstToken, ...] = ()
