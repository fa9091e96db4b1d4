"""Steps and their results on the way to workers and back."""

from __future__ import annotations

import numpy as np
import pytest

from libs.errors import InternalError, InvalidLogits, InvalidRequest, OctavoError, Overloaded, UnsupportedField
from libs.protogen.generation.v1 import generation_pb2
from libs.protogen.worker.v1 import worker_pb2
from services.engine import wire
from services.engine.core.scheduler_output import SchedulerOutput, StepDrafts, StepEvents
from services.engine.core.step_cost import StepWork


def step_with(drafts: StepDrafts | None) -> SchedulerOutput:
    counts = np.array([1, 3, 2])
    return SchedulerOutput(
        step_id=7,
        ended_slots=(),
        new_sequences=(),
        slots=np.array([4, 0, 2]),
        num_scheduled_tokens=counts,
        num_new_blocks=np.zeros(3, np.int64),
        new_block_ids=np.empty(0, np.int32),
        is_sampled=np.ones(3, np.bool_),
        handles=np.array([1, 2, 3], np.uint32),
        num_computed_tokens=np.array([5, 6, 7]),
        block_copies=(),
        work=StepWork(6, 0, 0),
        drafts=drafts,
    )


def response(**fields: object) -> worker_pb2.ExecuteStepsResponse:
    values: dict[str, object] = {"step_id": 7, "slots": [4, 0], "num_tokens": [1, 3], "token_ids": [9, 11, 12, 13]}
    return worker_pb2.ExecuteStepsResponse(**(values | fields))  # type: ignore[arg-type]


def logprobs_of(count: int) -> generation_pb2.TokenLogprobs:
    return generation_pb2.TokenLogprobs(
        logprobs=[-0.5 * number for number in range(count)], ranks=[1] * count, num_alternatives=[0] * count
    )


def test_drafts_leave_as_arrays_by_sequence() -> None:
    message = wire.step_message(step_with(StepDrafts(np.array([0, 2, 1]), np.array([8, 9, 5], np.uint32))))

    assert list(message.num_scheduled_tokens) == [1, 3, 2]
    assert list(message.num_draft_tokens) == [0, 2, 1]
    assert list(message.draft_token_ids) == [8, 9, 5]


def test_a_step_without_drafts_says_nothing_of_them() -> None:
    message = wire.step_message(step_with(None))

    assert (list(message.num_draft_tokens), list(message.draft_token_ids)) == ([], [])


def test_a_result_with_several_tokens_is_read_by_slot() -> None:
    result = wire.step_result_of(
        response(output_logprobs=worker_pb2.SlotLogprobs(slots=[0], tokens=logprobs_of(3)))
    )

    assert result.num_tokens.tolist() == [1, 3]
    assert result.token_ids.tolist() == [9, 11, 12, 13]
    assert result.output_logprobs is not None
    assert result.output_logprobs.slots.tolist() == [0, 0, 0]
    assert result.output_logprobs.tokens.logprobs.tolist() == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_tokens": [1]},
        {"num_tokens": [0, 4]},
        {"num_tokens": [1, 2]},
        {"output_logprobs": worker_pb2.SlotLogprobs(slots=[0], tokens=logprobs_of(1))},
        {"output_logprobs": worker_pb2.SlotLogprobs(slots=[3], tokens=logprobs_of(0))},
        {"output_logprobs": worker_pb2.SlotLogprobs(slots=[0, 4], tokens=logprobs_of(4))},
    ],
)
def test_a_result_whose_arrays_do_not_fit_together_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InternalError):
        wire.step_result_of(response(**fields))


def test_each_owner_gets_all_tokens_of_its_handles() -> None:
    events = StepEvents(
        step_id=7,
        handles=np.array([1, 2, 3], np.uint32),
        owners=np.array([5, 6, 5]),
        num_tokens=np.array([2, 1, 3]),
        token_ids=np.array([10, 11, 20, 30, 31, 32], np.uint32),
        ends=(),
    )

    messages = dict(wire.messages_by_owner(events))

    assert {owner: list(message.token_ids) for owner, message in messages.items()} == {
        5: [10, 11, 30, 31, 32],
        6: [20],
    }
    assert list(messages[5].num_tokens) == [2, 3]


@pytest.mark.parametrize(
    ("failure", "error_class"),
    [
        (worker_pb2.SEQUENCE_FAILURE_INVALID_LOGITS, InvalidLogits),
        (worker_pb2.SEQUENCE_FAILURE_UNSUPPORTED, UnsupportedField),
        (worker_pb2.SEQUENCE_FAILURE_NO_TOKEN_LEFT, InvalidRequest),
        # The client has done nothing wrong, and another try may succeed.
        (worker_pb2.SEQUENCE_FAILURE_NOT_READY, Overloaded),
    ],
)
def test_every_failure_of_a_sequence_has_its_error(
    failure: worker_pb2.SequenceFailure.ValueType, error_class: type[OctavoError]
) -> None:
    failed = worker_pb2.FailedSequence(slot=3, failure=failure, message="Why it is so.")

    result = wire.step_result_of(response(failed_sequences=[failed]))

    [one] = result.failures
    assert (one.slot, type(one.error), one.error.message) == (3, error_class, "Why it is so.")
