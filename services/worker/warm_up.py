"""Steps that a worker runs before it says that it is loaded, so that the first request finds everything warm.

Owns which steps those are: a prompt, sequences that join it with all kinds of sampling, and decodes of all of them.
It must not know how steps are computed. Without them the first request would pay for touching a step's memory,
starting threads and loading code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.worker.input_batch import BatchLimits
from services.worker.step import IntArray, NewSequence, SamplingParams, StepInput

# A long prompt is computed in chunks, and each chunk warms the same memory: more tokens than this cost time alone.
MAX_WARM_TOKENS = 256
MAX_WARM_SEQUENCES = 16
_NUM_DECODES = 2
_SETTINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=0.7, top_k=40, min_p=0.05, seed=3),
    SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, seed=4),
)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The steps and the slots of the KV cache that they write."""

    steps: tuple[StepInput, ...]
    written_slots: IntArray


def plan_warm_up(limits: BatchLimits) -> WarmUp:
    """Plan steps that keep the limits; there are none where the limits leave no room for them."""
    prompt_len = min(
        MAX_WARM_TOKENS, limits.max_num_batched_tokens, limits.max_model_len - _NUM_DECODES,
        limits.num_blocks * limits.block_size - _NUM_DECODES,
    )  # fmt: skip
    if prompt_len < 1:
        return WarmUp((), np.empty(0, dtype=np.int64))
    blocks = _Blocks(limits.block_size)
    long = _sequence(0, prompt_len, blocks, limits.vocab_size)
    num_short = min(
        MAX_WARM_SEQUENCES - 1, limits.max_num_seqs - 1, limits.max_num_batched_tokens - 1,
        (limits.num_blocks - blocks.num_taken) // blocks.num_for(1 + _NUM_DECODES),
    )  # fmt: skip
    short = [_sequence(1 + index, 1, blocks, limits.vocab_size) for index in range(max(0, num_short))]
    slots = np.arange(1 + len(short))
    steps = (
        _step(0, new=[long], slots=slots[:1], num_tokens=[prompt_len]),
        # Decode beside the first chunks of others, then decodes alone.
        _step(1, new=short, slots=slots, num_tokens=[1] * len(slots)),
        _step(2, new=[], slots=slots, num_tokens=[1] * len(slots)),
        _step(3, new=[], slots=slots[:0], num_tokens=[], ended=slots),
    )
    return WarmUp(steps, written_slots=np.arange(blocks.num_taken * limits.block_size))


class _Blocks:
    """Hands out blocks from the first on."""

    def __init__(self, block_size: int) -> None:
        self.num_taken = 0
        self._block_size = block_size

    def num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def take(self, num_tokens: int) -> IntArray:
        first = self.num_taken
        self.num_taken += self.num_for(num_tokens)
        return np.arange(first, self.num_taken)


def _sequence(slot: int, num_tokens: int, blocks: _Blocks, vocab_size: int) -> NewSequence:
    return NewSequence(
        slot=slot,
        token_ids=np.arange(slot, slot + num_tokens, dtype=np.int64) % vocab_size,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=blocks.take(num_tokens + _NUM_DECODES),
        sampling_params=_SETTINGS[slot % len(_SETTINGS)],
        choice_index=0,
    )


def _step(
    step_id: int, *, new: list[NewSequence], slots: IntArray, num_tokens: list[int], ended: IntArray | None = None
) -> StepInput:
    nothing = np.empty(0, dtype=np.int64)
    return StepInput(
        step_id=step_id,
        ended_slots=nothing if ended is None else ended,
        new_sequences=tuple(new),
        refused_sequences=(),
        slots=slots,
        num_scheduled_tokens=np.array(num_tokens, dtype=np.int64),
        num_new_blocks=np.zeros(len(slots), dtype=np.int64),
        new_block_ids=nothing,
        copy_source_block_ids=nothing,
        copy_target_block_ids=nothing,
        num_draft_tokens=np.zeros(len(slots), dtype=np.int64),
        draft_token_ids=nothing,
    )
