from __future__ import annotations

import numpy as np
import pytest

from libs.errors import InvalidRequest
from libs.grammar import Grammar, GrammarForm
from libs.logprobs import TokenLogprobs
from libs.protogen.generation.v1 import generation_pb2
from libs.protogen.worker.v1 import worker_pb2
from services.worker import wire
from services.worker.step import (
    FailedSequence,
    OutputLogprobs,
    PromptLogprobs,
    SampledTokens,
    SamplingParams,
    SequenceFailure,
    StepResult,
)
from tests.unit.worker.small_engine import ints


def test_a_step_arrives_as_arrays() -> None:
    message = worker_pb2.ExecuteStepsRequest(
        step_id=9,
        ended_slots=[4],
        slots=[2, 0],
        num_scheduled_tokens=[1, 30],
        num_new_blocks=[0, 2],
        new_block_ids=[8, 3],
        new_sequences=[
            worker_pb2.NewSequence(
                slot=0,
                token_ids=[5, 6, 7],
                num_prompt_tokens=2,
                num_computed_tokens=1,
                block_ids=[1],
                choice_index=3,
                sampling_params=generation_pb2.SamplingParams(seed=2**64 - 1, max_output_tokens=5),
            )
        ],
    )

    step = wire.step_input_of(message)

    assert step.step_id == 9
    assert [step.ended_slots.tolist(), step.slots.tolist()] == [[4], [2, 0]]
    assert step.num_scheduled_tokens.tolist() == [1, 30]
    assert [step.num_new_blocks.tolist(), step.new_block_ids.tolist()] == [[0, 2], [8, 3]]
    (sequence,) = step.new_sequences
    assert sequence.token_ids.tolist() == [5, 6, 7]
    assert (sequence.num_prompt_tokens, sequence.num_computed_tokens, sequence.choice_index) == (2, 1, 3)
    assert sequence.block_ids.tolist() == [1]
    assert sequence.sampling_params == SamplingParams(seed=2**64 - 1)


def sequence_with(params: generation_pb2.SamplingParams) -> worker_pb2.ExecuteStepsRequest:
    return worker_pb2.ExecuteStepsRequest(
        new_sequences=[worker_pb2.NewSequence(slot=6, token_ids=[1], num_prompt_tokens=1, sampling_params=params)]
    )


def test_all_served_parameters_arrive() -> None:
    message = sequence_with(
        generation_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            seed=3,
            max_output_tokens=10,
            min_output_tokens=2,
            stop_token_ids=[4],
            ignore_eos=True,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={8: 2.0},
            allowed_token_ids=[1, 2],
            bad_words=[generation_pb2.TokenSequence(token_ids=[5, 6])],
            num_logprobs=0,
            num_prompt_logprobs=2,
        )
    )

    (sequence,) = wire.step_input_of(message).new_sequences

    assert sequence.sampling_params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        min_output_tokens=2,
        stop_token_ids=(4,),
        ignore_eos=True,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((8, 2.0),),
        allowed_token_ids=(1, 2),
        bad_words=((5, 6),),
        num_logprobs=0,
        num_prompt_logprobs=2,
    )


def test_every_parameter_is_either_served_or_refused() -> None:
    served = set(SamplingParams.__dataclass_fields__)
    # The engine alone applies this one.
    known = served | {"max_output_tokens"}

    assert {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields} == known


@pytest.mark.parametrize(
    ("message", "grammar"),
    [
        (generation_pb2.Grammar(regex="a+"), Grammar(GrammarForm.REGEX, ("a+",))),
        (generation_pb2.Grammar(lark="start: A"), Grammar(GrammarForm.LARK, ("start: A",))),
        (generation_pb2.Grammar(json_schema="{}"), Grammar(GrammarForm.JSON_SCHEMA, ("{}",))),
        (
            generation_pb2.Grammar(choice=generation_pb2.ChoiceList(choices=["a", "b"])),
            Grammar(GrammarForm.CHOICE, ("a", "b")),
        ),
    ],
)
def test_every_form_of_a_grammar_is_read(message: generation_pb2.Grammar, grammar: Grammar) -> None:
    (sequence,) = wire.step_input_of(sequence_with(generation_pb2.SamplingParams(grammar=message))).new_sequences

    assert sequence.sampling_params.grammar == grammar


def test_a_grammar_without_a_form_refuses_its_sequence() -> None:
    step = wire.step_input_of(sequence_with(generation_pb2.SamplingParams(grammar=generation_pb2.Grammar())))

    assert step.new_sequences == ()
    (refused,) = step.refused_sequences
    assert refused.slot == 6
    assert isinstance(refused.error, InvalidRequest)


def test_a_value_out_of_range_refuses_its_sequence() -> None:
    (refused,) = wire.step_input_of(sequence_with(generation_pb2.SamplingParams(temperature=-1))).refused_sequences

    assert isinstance(refused.error, InvalidRequest)
    assert refused.error.param == "temperature"


def test_a_result_leaves_as_arrays() -> None:
    tokens = TokenLogprobs(
        np.array([-1.5], np.float32), ints(3), ints(2), ints(8, 9), np.array([-0.25, -1.0], np.float32)
    )
    result = StepResult(
        step_id=4,
        slots=ints(1, 0),
        num_tokens=ints(1, 1),
        token_ids=ints(40, 41),
        failed_sequences=(FailedSequence(7, SequenceFailure.INVALID_LOGITS, "no numbers"),),
        logprobs=OutputLogprobs(ints(0), tokens),
        prompt_logprobs=PromptLogprobs(ints(1), ints(5), ints(1), tokens),
        num_computed_tokens=2,
        duration_seconds=0.25,
    )

    message = wire.step_response(result)

    assert (list(message.slots), list(message.num_tokens), list(message.token_ids)) == ([1, 0], [1, 1], [40, 41])
    assert message.step_duration.nanos == 250_000_000
    (failed,) = message.failed_sequences
    assert (failed.slot, failed.failure) == (7, worker_pb2.SEQUENCE_FAILURE_INVALID_LOGITS)
    assert list(message.output_logprobs.slots) == [0]
    prompt = message.prompt_logprobs
    assert (list(prompt.slots), list(prompt.positions), list(prompt.num_tokens)) == ([1], [5], [1])
    for sent in (message.output_logprobs.tokens, prompt.tokens):
        assert (list(sent.logprobs), list(sent.ranks), list(sent.num_alternatives)) == ([-1.5], [3], [2])
        assert (list(sent.alternative_token_ids), list(sent.alternative_logprobs)) == ([8, 9], [-0.25, -1.0])


def test_a_step_in_which_nobody_wants_logprobs_says_nothing_of_them() -> None:
    result = StepResult.of(
        wire.step_input_of(worker_pb2.ExecuteStepsRequest(step_id=1)),
        SampledTokens(ints(2), ints(1), ints(40), (), OutputLogprobs.none(), PromptLogprobs.none()),
        (),
        num_computed_tokens=1,
        duration_seconds=0.1,
    )

    message = wire.step_response(result)

    assert not message.HasField("output_logprobs")
    assert not message.HasField("prompt_logprobs")


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": 2},
        {"rank": 1},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_model_len": 0},
    ],
)
def test_a_load_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    values = {
        "rank": 0,
        "tensor_parallel_size": 1,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }

    request = worker_pb2.LoadModelRequest()
    for name, value in (values | changes).items():
        setattr(request, name, value)

    with pytest.raises(InvalidRequest):
        wire.load_request_of(request)
