from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.input_batch import BatchLimits, InputBatch
from services.worker.warm_up import MAX_WARM_SEQUENCES, MAX_WARM_TOKENS, plan_warm_up

ROOMY = BatchLimits(
    max_num_seqs=256,
    max_model_len=8_192,
    max_num_batched_tokens=512,
    num_blocks=2_000,
    block_size=16,
    vocab_size=500,
)


def run(limits: BatchLimits) -> list[tuple[int, int]]:
    """Run the steps as a runner would, without a model; return sequences and tokens of each step."""
    batch, shapes = InputBatch(limits), list[tuple[int, int]]()
    plan = plan_warm_up(limits)
    for step in plan.steps:
        prepared = batch.prepare(step, lambda sequence: None)
        assert prepared.failed_sequences == ()
        if prepared.batch is not None:
            flat = prepared.batch
            assert flat.is_sampled.all()
            assert np.isin(flat.slot_mapping, plan.written_slots).all()
            batch.commit(flat, flat.slots, np.ones_like(flat.slots), np.zeros_like(flat.slots))
            shapes.append((len(flat.slots), len(flat.token_ids)))
    # No sequence is left that an engine would not know.
    batch.reset()
    return shapes


@given(
    st.builds(
        BatchLimits,
        max_num_seqs=st.integers(1, 40),
        max_model_len=st.integers(1, 600),
        max_num_batched_tokens=st.integers(1, 600),
        num_blocks=st.integers(1, 60),
        block_size=st.integers(1, 32),
        vocab_size=st.integers(1, 50),
    )
)
def test_steps_keep_any_limits(limits: BatchLimits) -> None:
    plan = plan_warm_up(limits)

    run(limits)

    assert len(plan.written_slots) <= limits.num_blocks * limits.block_size


def test_there_are_a_prompt_a_mixed_step_and_decodes() -> None:
    assert run(ROOMY) == [(1, MAX_WARM_TOKENS), (MAX_WARM_SEQUENCES, 16), (MAX_WARM_SEQUENCES, 16)]


def test_sampling_is_of_all_kinds() -> None:
    params = [sequence.sampling_params for step in plan_warm_up(ROOMY).steps for sequence in step.new_sequences]

    assert any(each.is_greedy for each in params)
    assert any(each.top_p is not None for each in params)
    assert any(each.top_k is not None for each in params)
    assert any(each.repetition_penalty != 1.0 for each in params)
