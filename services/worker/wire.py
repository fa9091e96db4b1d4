"""Translation between worker.v1 messages and the worker's own types.

Owns both directions. Arrays pass as arrays; only new sequences are looked at one by one. It must not know what
a runner does with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libs.errors import ClientError, InvalidRequest
from libs.grammar import Grammar, GrammarForm
from libs.logprobs import TokenLogprobs
from libs.protogen.generation.v1 import generation_pb2
from libs.protogen.worker.v1 import worker_pb2
from libs.rpc import duration_from_seconds
from services.worker.step import (
    IntArray,
    LoadedModel,
    LoadProgress,
    LoadRequest,
    NewSequence,
    OutputLogprobs,
    PromptLogprobs,
    RefusedSequence,
    SamplingParams,
    SequenceFailure,
    StepInput,
    StepResult,
)

_FAILURES = {
    SequenceFailure.NO_TOKEN_LEFT: worker_pb2.SEQUENCE_FAILURE_NO_TOKEN_LEFT,
    SequenceFailure.INVALID_LOGITS: worker_pb2.SEQUENCE_FAILURE_INVALID_LOGITS,
    SequenceFailure.NOT_READY: worker_pb2.SEQUENCE_FAILURE_NOT_READY,
    SequenceFailure.REFUSED: worker_pb2.SEQUENCE_FAILURE_UNSUPPORTED,
}


def load_request_of(message: worker_pb2.LoadModelRequest) -> LoadRequest:
    """Parse what is asked of this rank; raises InvalidRequest."""
    return LoadRequest(
        rank=message.rank,
        tensor_parallel_size=message.tensor_parallel_size,
        group_id=message.group_id,
        block_size=message.block_size,
        max_model_len=message.max_model_len if message.HasField("max_model_len") else None,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
    )


def progress_response(progress: LoadProgress) -> worker_pb2.LoadModelResponse:
    """Build a progress report."""
    return worker_pb2.LoadModelResponse(
        progress=worker_pb2.LoadProgress(
            description=progress.description,
            loaded_bytes=progress.loaded_bytes,
            total_bytes=progress.total_bytes,
        )
    )


def loaded_response(model: LoadedModel) -> worker_pb2.LoadModelResponse:
    """Build the last report."""
    return worker_pb2.LoadModelResponse(
        model=worker_pb2.LoadedModel(
            num_blocks=model.num_blocks,
            block_size=model.block_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            tokenizer_digest=model.tokenizer_digest,
            vocab_size=model.vocab_size,
            gpu_type=model.gpu_type,
            total_vram_bytes=model.total_vram_bytes,
            kv_cache_bytes=model.kv_cache_bytes,
            weights_bytes=model.weights_bytes,
        )
    )


def step_input_of(message: worker_pb2.ExecuteStepsRequest) -> StepInput:
    """Parse one step; a sequence that asks for what is not served is set apart, not refused as a whole step."""
    sequences: list[NewSequence] = []
    refused: list[RefusedSequence] = []
    for new in message.new_sequences:
        try:
            sequences.append(_new_sequence_of(new))
        except ClientError as error:
            refused.append(RefusedSequence(new.slot, error))
    slots = _array(message.slots)
    return StepInput(
        step_id=message.step_id,
        ended_slots=_array(message.ended_slots),
        new_sequences=tuple(sequences),
        refused_sequences=tuple(refused),
        slots=slots,
        num_scheduled_tokens=_array(message.num_scheduled_tokens),
        num_new_blocks=_array(message.num_new_blocks),
        new_block_ids=_array(message.new_block_ids),
        copy_source_block_ids=_array(message.copy_source_block_ids),
        copy_target_block_ids=_array(message.copy_target_block_ids),
        num_draft_tokens=_array(message.num_draft_tokens) if message.num_draft_tokens else np.zeros_like(slots),
        draft_token_ids=_array(message.draft_token_ids),
    )


def step_response(result: StepResult) -> worker_pb2.ExecuteStepsResponse:
    """Build a step's result."""
    return worker_pb2.ExecuteStepsResponse(
        step_id=result.step_id,
        slots=result.slots.tolist(),
        num_tokens=result.num_tokens.tolist(),
        token_ids=result.token_ids.tolist(),
        failed_sequences=[
            worker_pb2.FailedSequence(slot=failed.slot, failure=_FAILURES[failed.failure], message=failed.message)
            for failed in result.failed_sequences
        ],
        step_duration=duration_from_seconds(result.duration_seconds),
        output_logprobs=_output_logprobs_message(result.logprobs),
        prompt_logprobs=_prompt_logprobs_message(result.prompt_logprobs),
    )


def _output_logprobs_message(logprobs: OutputLogprobs) -> worker_pb2.SlotLogprobs | None:
    if not len(logprobs.slots):
        return None
    return worker_pb2.SlotLogprobs(
        slots=list(dict.fromkeys(logprobs.slots.tolist())), tokens=_token_logprobs_message(logprobs.tokens)
    )


def _prompt_logprobs_message(logprobs: PromptLogprobs) -> worker_pb2.SlotPromptLogprobs | None:
    if not len(logprobs.slots):
        return None
    return worker_pb2.SlotPromptLogprobs(
        slots=logprobs.slots.tolist(),
        positions=logprobs.positions.tolist(),
        num_tokens=logprobs.num_tokens.tolist(),
        tokens=_token_logprobs_message(logprobs.tokens),
    )


def _token_logprobs_message(tokens: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    return generation_pb2.TokenLogprobs(
        logprobs=tokens.logprobs.tolist(),
        ranks=tokens.ranks.tolist(),
        num_alternatives=tokens.num_alternatives.tolist(),
        alternative_token_ids=tokens.alternative_token_ids.tolist(),
        alternative_logprobs=tokens.alternative_logprobs.tolist(),
    )


def _new_sequence_of(message: worker_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        slot=message.slot,
        token_ids=_array(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=_array(message.block_ids),
        sampling_params=_sampling_params_of(message.sampling_params),
        choice_index=message.choice_index,
    )


def _sampling_params_of(message: generation_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        seed=message.seed,
        min_output_tokens=message.min_output_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(message.logit_bias.items()),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        grammar=_grammar_of(message.grammar) if message.HasField("grammar") else None,
    )


def _grammar_of(message: generation_pb2.Grammar) -> Grammar:
    match message.WhichOneof("form"):
        case "json_schema":
            return Grammar(GrammarForm.JSON_SCHEMA, (message.json_schema,))
        case "regex":
            return Grammar(GrammarForm.REGEX, (message.regex,))
        case "lark":
            return Grammar(GrammarForm.LARK, (message.lark,))
        case "choice":
            return Grammar(GrammarForm.CHOICE, tuple(message.choice.choices))
        case _:
            raise InvalidRequest("A grammar has exactly one form; this one has none.", param="grammar")


def _array(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64) if values else np.empty(0, dtype=np.int64)
