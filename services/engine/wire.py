"""Conversion between the engine's own types and its protos, without a Python loop over tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.errors import (
    InternalError,
    InvalidLogits,
    InvalidRequest,
    OctavoError,
    Overloaded,
    UnsupportedField,
)
from libs.kv import PrefixHash, SharedPrefix
from libs.kv.block_pool import PoolChanges
from libs.logprobs import TokenLogprobs
from libs.protogen.engine.v1 import engine_pb2
from libs.protogen.generation.v1 import generation_pb2
from libs.protogen.worker.v1 import worker_pb2
from libs.rpc import duration_from_seconds, seconds_from_duration, status_from_error
from services.engine.config import EngineConfig
from services.engine.core.logprobs import SlotLogprobs, SlotPromptLogprobs
from services.engine.core.request import FinishReason, Request, SequenceEnd, StopCriteria, Usage
from services.engine.core.scheduler_output import (
    PageTableRow,
    SchedulerOutput,
    SlotFailure,
    StepEvents,
    StepResult,
)
from services.engine.core.timings import CacheMissReason, FirstToken, Stall, StallReason
from services.engine.feed import FeedEvent
from services.engine.identity import EngineState, EngineStatus, LoadedModel

# 32 bytes each: parts stay well under 1 MB.
_HASHES_PER_PART = 16_384
_ROWS_PER_PART = 4_096

_STATES = {
    EngineState.STARTING: engine_pb2.ENGINE_STATE_STARTING,
    EngineState.READY: engine_pb2.ENGINE_STATE_READY,
    EngineState.DRAINING: engine_pb2.ENGINE_STATE_DRAINING,
}
_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: generation_pb2.FINISH_REASON_ABORTED,
}
_MISS_REASONS = {
    CacheMissReason.NOT_SEEN: generation_pb2.CACHE_MISS_REASON_NOT_SEEN,
    CacheMissReason.EVICTED: generation_pb2.CACHE_MISS_REASON_EVICTED,
    CacheMissReason.BEHIND_GAP: generation_pb2.CACHE_MISS_REASON_BEHIND_GAP,
    CacheMissReason.TAIL: generation_pb2.CACHE_MISS_REASON_TAIL,
    CacheMissReason.PROMPT_LOGPROBS: generation_pb2.CACHE_MISS_REASON_PROMPT_LOGPROBS,
    CacheMissReason.CACHING_OFF: generation_pb2.CACHE_MISS_REASON_CACHING_OFF,
}
_STALL_REASONS = {
    StallReason.PREEMPTION: generation_pb2.STALL_REASON_PREEMPTION,
    StallReason.PREFILL: generation_pb2.STALL_REASON_PREFILL,
    StallReason.LONG_STEP: generation_pb2.STALL_REASON_LONG_STEP,
    StallReason.ENGINE_WAIT: generation_pb2.STALL_REASON_ENGINE_WAIT,
}

# ---- generation: gateway and engine ----


def request_from_submit(submit: generation_pb2.Submit, *, owner: int, now: float) -> Request:
    """Parse a submit; raises InvalidRequest for one that breaks the contract."""
    if not submit.request_id:
        raise InvalidRequest("A submit needs a request_id.", param="request_id")
    params = submit.sampling_params
    deadline = None
    if submit.HasField("remaining_time"):
        deadline = now + seconds_from_duration(submit.remaining_time)
    return Request(
        request_id=submit.request_id,
        owner=owner,
        prompt_token_ids=np.array(submit.prompt_token_ids, np.uint32),
        stop_criteria=StopCriteria(
            max_output_tokens=params.max_output_tokens,
            min_output_tokens=params.min_output_tokens,
            stop_token_ids=frozenset(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
        ),
        sampling_params=params,
        num_params_bytes=params.ByteSize(),
        tenant_id=submit.tenant_id,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        shared_prefix=SharedPrefix(submit.shared_prefix.salt, submit.shared_prefix.num_blocks)
        if submit.HasField("shared_prefix")
        else None,
        deadline=deadline,
        choices=tuple(np.array(choice.output_token_ids, np.uint32) for choice in submit.choices),
        choice_indices=tuple(
            choice.choice_index if choice.HasField("choice_index") else place
            for place, choice in enumerate(submit.choices)
        ),
        num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
        num_prompt_logprobs=params.num_prompt_logprobs if params.HasField("num_prompt_logprobs") else None,
        stall_bound_seconds=seconds_from_duration(submit.stall_bound) if submit.HasField("stall_bound") else None,
        received_time=now,
        traceparent=submit.traceparent or None,
    )


def refuse_unknown_tokens(request: Request, vocab_size: int) -> None:
    """Raise InvalidRequest when a token id is not in the vocabulary."""
    for ids in (request.prompt_token_ids, *request.choices):
        if len(ids) and int(ids.max()) >= vocab_size:
            raise InvalidRequest(
                f"Token id {int(ids.max())} is not in the vocabulary of {vocab_size}.", param="prompt_token_ids"
            )


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to a gateway, and when the step that it tells of was applied, on the engine's clock."""

    message: generation_pb2.GenerateResponse
    applied_time: float | None = None


def started_message(request_id: str, handles: Sequence[int]) -> generation_pb2.GenerateResponse:
    """Tell a request's handles."""
    started = generation_pb2.Started(request_id=request_id, handles=handles)
    return generation_pb2.GenerateResponse(started=[started])


def messages_by_owner(events: StepEvents) -> Iterator[tuple[int, generation_pb2.GenerateResponse]]:
    """Split a step's events into one message for each owner that has any."""
    owners = set(np.unique(events.owners).tolist()) | {end.owner for end in events.ends}
    if events.prompt_logprobs is not None:
        owners.update(events.prompt_logprobs.owners.tolist())
    for owner in owners:
        mine = events.owners == owner
        handles = events.handles[mine]
        message = ends_message([end for end in events.ends if end.owner == owner], step_id=events.step_id)
        message.handles.extend(handles.tolist())
        message.num_tokens.extend(events.num_tokens[mine].tolist())
        message.token_ids.extend(events.token_ids[np.repeat(mine, events.num_tokens)].tolist())
        message.first_tokens.extend(_first_token_message(one) for one in events.first_tokens if one.owner == owner)
        _add_logprobs(message, events, owner)
        yield owner, message


def _first_token_message(first: FirstToken) -> generation_pb2.FirstToken:
    return generation_pb2.FirstToken(
        handle=first.handle,
        queue_duration=duration_from_seconds(first.queue_seconds),
        prefill_duration=duration_from_seconds(first.prefill_seconds),
        num_cached_tokens=first.num_cached_tokens,
        misses=[
            generation_pb2.CacheMiss(reason=_MISS_REASONS[reason], num_tokens=count)
            for reason, count in first.misses.items()
        ],
    )


def _add_logprobs(message: generation_pb2.GenerateResponse, events: StepEvents, owner: int) -> None:
    if events.output_logprobs is not None:
        output = events.output_logprobs.of_owner(owner)
        if len(output.handles):
            message.output_logprobs.handles.extend(output.handles.tolist())
            message.output_logprobs.tokens.CopyFrom(_token_logprobs_message(output.tokens))
    if events.prompt_logprobs is not None:
        prompt = events.prompt_logprobs.of_owner(owner)
        if len(prompt.handles):
            message.prompt_logprobs.handles.extend(prompt.handles.tolist())
            message.prompt_logprobs.num_tokens.extend(prompt.num_tokens.tolist())
            message.prompt_logprobs.tokens.CopyFrom(_token_logprobs_message(prompt.tokens))


def _token_logprobs_message(tokens: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    return generation_pb2.TokenLogprobs(
        logprobs=tokens.logprobs.tolist(),
        ranks=tokens.ranks.tolist(),
        num_alternatives=tokens.num_alternatives.tolist(),
        alternative_token_ids=tokens.alternative_token_ids.tolist(),
        alternative_logprobs=tokens.alternative_logprobs.tolist(),
    )


def ends_message(ends: Iterable[SequenceEnd], step_id: int = 0) -> generation_pb2.GenerateResponse:
    """Tell ends, of one owner."""
    message = generation_pb2.GenerateResponse(step_id=step_id)
    for end in ends:
        if end.error is not None:
            message.failed.add(
                handle=end.handle, status=status_from_error(end.error), usage=_usage_message(end.usage)
            )
        else:
            assert end.reason is not None
            message.finished.add(
                handle=end.handle,
                reason=_REASONS[end.reason],
                stop_token_id=end.stop_token_id,
                usage=_usage_message(end.usage),
            )
    return message


def refusal_message(request_id: str, handles: Sequence[int], error: OctavoError) -> generation_pb2.GenerateResponse:
    """Tell that a request was refused: its handles, each with its failure."""
    message = started_message(request_id, handles)
    for handle in handles:
        message.failed.add(handle=handle, status=status_from_error(error), usage=generation_pb2.Usage())
    return message


def _usage_message(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        num_cached_tokens=usage.num_cached_tokens,
        num_computed_tokens=usage.num_computed_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_discarded_tokens=usage.num_discarded_tokens,
        num_preemptions=usage.num_preemptions,
        queue_duration=duration_from_seconds(usage.queue_seconds),
        prefill_duration=duration_from_seconds(usage.prefill_seconds),
        decode_duration=duration_from_seconds(usage.decode_seconds),
        stalls=[_stall_message(stall) for stall in usage.stalls],
        num_stalls=usage.num_stalls,
    )


def _stall_message(stall: Stall) -> generation_pb2.Stall:
    return generation_pb2.Stall(
        step_id=stall.step_id,
        gap=duration_from_seconds(stall.gap_seconds),
        reason=_STALL_REASONS[stall.reason],
        step_duration=duration_from_seconds(stall.step_seconds),
        num_prefill_tokens=stall.num_prefill_tokens,
    )


# ---- steps: engine and workers ----


def load_request(config: EngineConfig, rank: int, group_id: str) -> worker_pb2.LoadModelRequest:
    """Say what a rank serves, and in which group."""
    return worker_pb2.LoadModelRequest(
        rank=rank,
        tensor_parallel_size=len(config.worker_addresses),
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        group_id=group_id,
    )


def loaded_model_of(model: worker_pb2.LoadedModel) -> LoadedModel:
    """Parse what a worker said of the model."""
    return LoadedModel(
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        max_model_len=model.max_model_len,
        eos_token_ids=tuple(model.eos_token_ids),
        tokenizer_digest=model.tokenizer_digest,
        vocab_size=model.vocab_size,
        gpu_type=model.gpu_type,
        total_vram_bytes=model.total_vram_bytes,
        kv_cache_bytes=model.kv_cache_bytes,
        weights_bytes=model.weights_bytes,
    )


def step_message(output: SchedulerOutput) -> worker_pb2.ExecuteStepsRequest:
    """Build the step for the workers; the same for all ranks."""
    message = worker_pb2.ExecuteStepsRequest(
        step_id=output.step_id,
        ended_slots=output.ended_slots,
        slots=output.slots.tolist(),
        num_scheduled_tokens=output.num_scheduled_tokens.tolist(),
        num_new_blocks=output.num_new_blocks.tolist(),
        new_block_ids=output.new_block_ids.tolist(),
        copy_source_block_ids=[copy.source_block_id for copy in output.block_copies],
        copy_target_block_ids=[copy.target_block_id for copy in output.block_copies],
    )
    if output.drafts is not None:
        message.num_draft_tokens.extend(output.drafts.num_tokens.tolist())
        message.draft_token_ids.extend(output.drafts.token_ids.tolist())
    for new in output.new_sequences:
        assert isinstance(new.sampling_params, generation_pb2.SamplingParams)
        message.new_sequences.add(
            slot=new.slot,
            token_ids=new.token_ids.tolist(),
            num_prompt_tokens=new.num_prompt_tokens,
            num_computed_tokens=new.num_computed_tokens,
            block_ids=new.block_ids,
            sampling_params=new.sampling_params,
            choice_index=new.choice_index,
        )
        if not new.wants_prompt_logprobs:
            message.new_sequences[-1].sampling_params.ClearField("num_prompt_logprobs")
    return message


def empty_step_message() -> worker_pb2.ExecuteStepsRequest:
    """Build a step that computes nothing; the scheduler's steps count from one."""
    return worker_pb2.ExecuteStepsRequest(step_id=0)


def step_result_of(message: worker_pb2.ExecuteStepsResponse) -> StepResult:
    """Parse a step's result; raises InternalError when a slot got no token or the arrays do not fit together."""
    slots, num_tokens = np.array(message.slots, np.int64), np.array(message.num_tokens, np.int64)
    if len(num_tokens) != len(slots) or (num_tokens < 1).any() or num_tokens.sum() != len(message.token_ids):
        raise InternalError(f"Step {message.step_id} must give at least one token for each sampled slot.")
    return StepResult(
        step_id=message.step_id,
        slots=slots,
        num_tokens=num_tokens,
        token_ids=np.array(message.token_ids, np.uint32),
        failures=tuple(SlotFailure(failed.slot, _failure_of(failed)) for failed in message.failed_sequences),
        step_seconds=seconds_from_duration(message.step_duration),
        output_logprobs=_slot_logprobs_of(message.output_logprobs, slots, num_tokens)
        if message.HasField("output_logprobs")
        else None,
        prompt_logprobs=_slot_prompt_logprobs_of(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
    )


def _slot_logprobs_of(
    message: worker_pb2.SlotLogprobs, sampled: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
) -> SlotLogprobs:
    is_measured = np.isin(sampled, message.slots)
    measured, counts = sampled[is_measured], num_tokens[is_measured]
    logprobs = SlotLogprobs(np.repeat(measured, counts), _token_logprobs_of(message.tokens))
    if measured.tolist() != list(message.slots) or len(logprobs.tokens) != len(logprobs.slots):
        raise InternalError(
            f"{len(logprobs.tokens)} log-probabilities came for slots {list(message.slots)}, which got "
            f"{counts.tolist()} tokens."
        )
    return logprobs


def _slot_prompt_logprobs_of(message: worker_pb2.SlotPromptLogprobs) -> SlotPromptLogprobs:
    logprobs = SlotPromptLogprobs(
        np.array(message.slots, np.int64),
        np.array(message.positions, np.int64),
        np.array(message.num_tokens, np.int64),
        _token_logprobs_of(message.tokens),
    )
    lengths = {len(logprobs.slots), len(logprobs.positions), len(logprobs.num_tokens)}
    if len(lengths) != 1 or logprobs.num_tokens.sum() != len(logprobs.tokens):
        raise InternalError("The log-probabilities of a step's prompts do not fit to their slots.")
    return logprobs


def _token_logprobs_of(message: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    tokens = TokenLogprobs(
        np.array(message.logprobs, np.float32),
        np.array(message.ranks, np.int64),
        np.array(message.num_alternatives, np.int64),
        np.array(message.alternative_token_ids, np.int64),
        np.array(message.alternative_logprobs, np.float32),
    )
    num_alternatives = int(tokens.num_alternatives.sum())
    if not len(tokens.logprobs) == len(tokens.ranks) == len(tokens.num_alternatives) or not num_alternatives == len(
        tokens.alternative_token_ids
    ) == len(tokens.alternative_logprobs):
        raise InternalError("The arrays of a step's log-probabilities differ in their lengths.")
    return tokens


def _failure_of(failed: worker_pb2.FailedSequence) -> OctavoError:
    if failed.failure == worker_pb2.SEQUENCE_FAILURE_UNSUPPORTED:
        return UnsupportedField(failed.message, param="sampling_params")
    if failed.failure == worker_pb2.SEQUENCE_FAILURE_NO_TOKEN_LEFT:
        return InvalidRequest(failed.message, param="sampling_params")
    if failed.failure == worker_pb2.SEQUENCE_FAILURE_NOT_READY:
        return Overloaded(failed.message, retry_after_seconds=1.0)
    return InvalidLogits(failed.message or "The model gave logits that are not numbers.")


# ---- identity and watch: engine and routers ----


def engine_message(status: EngineStatus) -> engine_pb2.Engine:
    """Say who the engine is."""
    identity = status.identity
    contract = identity.hash_contract
    return engine_pb2.Engine(
        engine_id=identity.engine_id,
        incarnation=identity.incarnation,
        address=identity.address,
        model_name=identity.model_name,
        hash_contract=None
        if contract is None
        else engine_pb2.HashContract(
            block_size=contract.block_size,
            algorithm=contract.algorithm,
            tokenizer_digest=contract.tokenizer_digest,
        ),
        state=_STATES[status.state],
        num_blocks=identity.num_blocks,
        max_model_len=identity.max_model_len,
        max_num_seqs=identity.max_num_seqs,
        max_num_batched_tokens=identity.max_num_batched_tokens,
        gpu_type=identity.gpu_type,
        total_vram_bytes=identity.total_vram_bytes,
        tensor_parallel_size=identity.tensor_parallel_size,
    )


def load_message(status: EngineStatus) -> engine_pb2.EngineLoad:
    """Say how busy the engine is."""
    message = engine_pb2.EngineLoad(
        state=_STATES[status.state], prefill_tokens_per_second=status.prefill_tokens_per_second
    )
    if status.decode_step_seconds is not None:
        message.decode_step_duration.CopyFrom(duration_from_seconds(status.decode_step_seconds))
    if status.load is not None:
        message.num_running_requests = status.load.num_running
        message.num_waiting_requests = status.load.num_waiting
        message.num_pending_prefill_tokens = status.load.num_pending_prefill_tokens
        message.num_available_blocks = status.load.num_available_blocks
        message.num_blocks = status.load.num_blocks
    return message


def snapshot_messages(status: EngineStatus, hashes: Sequence[PrefixHash]) -> list[engine_pb2.EngineSnapshot]:
    """Build a snapshot in parts."""
    starts = range(0, max(len(hashes), 1), _HASHES_PER_PART)
    parts = [engine_pb2.EngineSnapshot(prefix_hashes=hashes[start : start + _HASHES_PER_PART]) for start in starts]
    parts[0].engine.CopyFrom(engine_message(status))
    parts[0].load.CopyFrom(load_message(status))
    parts[0].is_first_part = parts[-1].is_last_part = True
    return parts


def block_changes_message(changes: PoolChanges) -> engine_pb2.BlockChanges:
    """Tell changes of the prefix cache."""
    return engine_pb2.BlockChanges(
        removed_hashes=changes.removed, stored_hashes=[prefix_hash for prefix_hash, _ in changes.stored]
    )


def watch_messages(event: FeedEvent) -> Iterator[engine_pb2.WatchEngineResponse]:
    """Build the messages of one event; only a large snapshot needs several."""

    def message() -> engine_pb2.WatchEngineResponse:
        return engine_pb2.WatchEngineResponse(incarnation=event.incarnation, sequence_number=event.sequence_number)

    if event.snapshot_hashes is not None:
        assert event.status is not None
        for part in snapshot_messages(event.status, event.snapshot_hashes):
            response = message()
            response.snapshot.CopyFrom(part)
            yield response
    elif event.changes is not None:
        response = message()
        response.block_changes.CopyFrom(block_changes_message(event.changes))
        yield response
    elif event.status is not None:
        response = message()
        response.load.CopyFrom(load_message(event.status))
        yield response


def page_table_messages(rows: Sequence[PageTableRow]) -> Iterator[engine_pb2.GetPageTableResponse]:
    """Build the messages of a page table."""
    for start in range(0, len(rows), _ROWS_PER_PART):
        message = engine_pb2.GetPageTableResponse()
        for row in rows[start : start + _ROWS_PER_PART]:
            message.rows.add(
                handle=row.handle,
                logical_token_index=row.logical_token_index,
                physical_block_id=row.physical_block_id,
                reference_count=row.reference_count,
            )
        yield message
