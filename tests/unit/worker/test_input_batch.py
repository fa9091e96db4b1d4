from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from libs.errors import InternalError, InvalidRequest, UnsupportedField
from services.worker.input_batch import BatchLimits, FlatBatch, InputBatch
from services.worker.step import NewSequence, RefusedSequence, SequenceFailure, StepInput
from tests.unit.worker.small_engine import ints, new_sequence, step

BLOCK_SIZE = 4
NULL_BLOCK = 20


def make_batch(**changes: int) -> InputBatch:
    values = {
        "max_num_seqs": 4,
        "max_model_len": 18,
        "max_num_batched_tokens": 30,
        "num_blocks": NULL_BLOCK,
        "block_size": BLOCK_SIZE,
        "vocab_size": 100,
    }
    return InputBatch(BatchLimits(**(values | changes)))


def admit_all(sequence: NewSequence) -> None:
    pass


def prepare(batch: InputBatch, given: StepInput) -> FlatBatch:
    prepared = batch.prepare(given, admit_all)
    assert prepared.batch is not None
    return prepared.batch


def test_lays_out_chunks_and_single_tokens_one_after_the_other() -> None:
    batch = make_batch()
    first = prepare(
        batch,
        step(
            new=[new_sequence(2, [10, 11, 12, 13, 14, 15]), new_sequence(0, [20, 21, 22, 23, 24])],
            scheduled=[(2, 3, [7]), (0, 5, [3, 9])],
        ),
    )
    batch.commit(first, ints(0), ints(1), ints(25))

    second = prepare(batch, step(scheduled=[(0, 1, []), (2, 3, [5])]))

    assert first.token_ids.tolist() == [10, 11, 12, 20, 21, 22, 23, 24]
    assert first.is_sampled.tolist() == [False, True]
    assert second.token_ids.tolist() == [25, 13, 14, 15]
    assert second.positions.tolist() == [5, 3, 4, 5]
    assert second.slot_mapping.tolist() == [9 * 4 + 1, 7 * 4 + 3, 5 * 4, 5 * 4 + 1]
    assert second.first_rows.tolist() == [0, 1]
    assert second.last_rows.tolist() == [0, 3]
    assert second.context_lens.tolist() == [6, 6]
    assert second.block_tables.tolist() == [[3, 9], [7, 5]]
    assert second.is_sampled.tolist() == [True, True]
    assert second.rows_of(np.array([False, True])).tolist() == [1, 2, 3]


def test_tables_are_padded_with_the_null_block() -> None:
    batch = prepare(
        make_batch(),
        step(
            new=[new_sequence(0, [1]), new_sequence(1, list(range(9)))],
            scheduled=[(0, 1, [4]), (1, 9, [1, 2, 3])],
        ),
    )

    assert batch.block_tables.tolist() == [[4, NULL_BLOCK, NULL_BLOCK], [1, 2, 3]]


def test_a_cached_beginning_is_not_computed_again() -> None:
    batch = prepare(
        make_batch(),
        step(
            new=[new_sequence(1, list(range(10)), num_computed_tokens=8, block_ids=[6, 2])],
            scheduled=[(1, 2, [11])],
        ),
    )

    assert batch.token_ids.tolist() == [8, 9]
    assert batch.slot_mapping.tolist() == [44, 45]
    assert batch.block_tables.tolist() == [[6, 2, 11]]


def test_a_resumed_sequence_keeps_its_output_position() -> None:
    batch = make_batch()

    prepare(batch, step(new=[new_sequence(3, [1, 2, 3, 4], num_prompt_tokens=1)], scheduled=[(3, 4, [0])]))

    assert batch.num_output_tokens(ints(3)).tolist() == [3]


def test_an_ended_slot_takes_another_sequence_in_the_same_step() -> None:
    batch = make_batch()
    prepare(batch, step(new=[new_sequence(0, [1, 2, 3, 4, 5])], scheduled=[(0, 5, [1, 2])]))

    flat = prepare(batch, step(ended=[0], new=[new_sequence(0, [9])], scheduled=[(0, 1, [3])]))

    assert flat.token_ids.tolist() == [9]
    assert flat.block_tables.tolist() == [[3]]


def test_many_random_steps_equal_a_naive_layout() -> None:
    random = np.random.default_rng(3)
    batch = make_batch(max_num_seqs=8, max_model_len=200, max_num_batched_tokens=10_000, num_blocks=1_000)
    free = random.permutation(1_000).tolist()
    known: dict[int, tuple[list[int], list[int], int]] = {}  # tokens, blocks, computed
    ended: list[int] = []
    for _ in range(120):
        new = []
        for slot in random.permutation(8).tolist():
            if slot in known and random.random() < 0.1:
                del known[slot]
                ended.append(slot)
            elif slot not in known and random.random() < 0.4:
                known[slot] = (random.integers(0, 100, random.integers(1, 60)).tolist(), [], 0)
                new.append(new_sequence(slot, known[slot][0]))
        scheduled, expected_tokens, expected_slots = [], [], []
        for slot in random.permutation(list(known)).tolist() if known else []:
            tokens, blocks, computed = known[slot]
            if random.random() < 0.3 or len(tokens) > 150:
                continue
            count = int(random.integers(1, len(tokens) - computed + 1))
            fresh = [free.pop() for _ in range(-(-(computed + count) // BLOCK_SIZE) - len(blocks))]
            blocks += fresh
            scheduled.append((slot, count, fresh))
            for position in range(computed, computed + count):
                expected_tokens.append(tokens[position])
                expected_slots.append(blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            known[slot] = (tokens, blocks, computed + count)
        prepared = batch.prepare(step(new=new, ended=ended, scheduled=scheduled), admit_all)
        ended = []
        if prepared.batch is None:
            assert not scheduled
            continue
        assert prepared.batch.token_ids.tolist() == expected_tokens
        assert prepared.batch.slot_mapping.tolist() == expected_slots
        sampled = prepared.batch.slots[prepared.batch.is_sampled]
        assert sampled.tolist() == [slot for slot, _, _ in scheduled if known[slot][2] == len(known[slot][0])]
        drawn = random.integers(0, 100, len(sampled))
        batch.commit(prepared.batch, sampled, np.ones_like(sampled), drawn)
        for slot, token_id in zip(sampled.tolist(), drawn.tolist(), strict=True):
            known[slot][0].append(token_id)


def test_a_refused_sequence_fails_and_its_neighbour_goes_on() -> None:
    batch = make_batch()
    error = UnsupportedField("No grammar here.", param="grammar")
    given = step(new=[new_sequence(1, [5, 6])], scheduled=[(0, 2, [1]), (1, 2, [2])])
    given = dataclasses.replace(given, refused_sequences=(RefusedSequence(0, error),))

    prepared = batch.prepare(given, admit_all)

    assert [(f.slot, f.failure) for f in prepared.failed_sequences] == [(0, SequenceFailure.REFUSED)]
    assert prepared.batch is not None
    assert prepared.batch.slots.tolist() == [1]
    assert prepared.batch.block_tables.tolist() == [[2]]


def test_a_sequence_that_is_not_admitted_fails_until_it_ends() -> None:
    batch = make_batch()

    def refuse(sequence: NewSequence) -> None:
        raise InvalidRequest("No.", param="top_p")

    first = batch.prepare(step(new=[new_sequence(0, [1])], scheduled=[(0, 1, [1])]), refuse)
    again = batch.prepare(step(scheduled=[(0, 1, [])]), admit_all)
    after = batch.prepare(step(ended=[0], new=[new_sequence(0, [1])], scheduled=[(0, 1, [1])]), admit_all)

    assert first.batch is None
    assert [f.slot for f in first.failed_sequences] == [f.slot for f in again.failed_sequences] == [0]
    assert after.failed_sequences == ()


def test_token_ids_outside_the_vocabulary_fail_their_sequence() -> None:
    prepared = make_batch().prepare(step(new=[new_sequence(0, [1, 100])], scheduled=[(0, 2, [1])]), admit_all)

    assert [f.slot for f in prepared.failed_sequences] == [0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (step(ended=[1]), "end, but hold no sequence"),
        (step(new=[new_sequence(0, [1])]), "slot 0, which holds one"),
        (step(new=[new_sequence(4, [1])]), "there are 4"),
        (step(scheduled=[(1, 1, [])]), "scheduled, but hold no sequence"),
        (step(scheduled=[(0, 1, [3]), (0, 1, [])]), "twice"),
        (step(scheduled=[(0, 0, [])]), "token counts"),
        (step(scheduled=[(0, 3, [3])]), "have \\[2\\]"),
        (step(scheduled=[(0, 2, [])]), "their blocks hold \\[0\\]"),
        (step(scheduled=[(0, 2, [NULL_BLOCK])]), "there are 20"),
        (step(scheduled=[(0, 2, [1, 2, 3, 4, 5, 6])]), "the longest has"),
        (step(new=[new_sequence(1, list(range(40)))], scheduled=[]), "the limit is 18"),
        (step(new=[new_sequence(1, [1, 2], num_prompt_tokens=3)]), "3 prompt tokens"),
        (step(new=[new_sequence(1, [1, 2], num_computed_tokens=2, block_ids=[4])]), "at least one must be left"),
    ],
)
def test_a_step_that_contradicts_what_is_known_is_a_fault(given: StepInput, words: str) -> None:
    batch = make_batch()
    batch.prepare(step(new=[new_sequence(0, [1, 2])]), admit_all)

    with pytest.raises(InternalError, match=words):
        batch.prepare(given, admit_all)


def test_too_many_tokens_in_a_step_are_a_fault() -> None:
    batch = make_batch(max_num_batched_tokens=3)

    with pytest.raises(InternalError, match="the limit is 3"):
        batch.prepare(step(new=[new_sequence(0, [1, 2, 3, 4])], scheduled=[(0, 4, [1])]), admit_all)


def test_reset_forgets_sequences() -> None:
    batch = make_batch()
    prepare(batch, step(new=[new_sequence(0, [1, 2])], scheduled=[(0, 2, [1])]))

    batch.reset()

    assert prepare(batch, step(new=[new_sequence(0, [7])], scheduled=[(0, 1, [5])])).block_tables.tolist() == [[5]]
