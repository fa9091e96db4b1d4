"""Translation between the gateway's types and the messages of other tiers. Pure; the only reader of protos."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from google.protobuf.timestamp_pb2 import Timestamp

from libs.errors import OctavoError
from libs.grammar import Grammar, GrammarForm
from libs.kv import HashContract
from libs.protogen.engine.v1 import engine_pb2
from libs.protogen.generation.v1 import generation_pb2
from libs.protogen.router.v1 import router_pb2
from libs.protogen.telemetry.v1 import telemetry_pb2
from libs.rpc import duration_from_seconds, error_from_status, seconds_from_duration
from services.gateway.audit_record import AuditRecord, RequestStatus
from services.gateway.engine_times import EngineStall, FirstTokenReport
from services.gateway.generation import (
    EngineUsage,
    FinishReason,
    GenerationEnd,
    GenerationFailed,
    GenerationFinished,
    SamplingParams,
    StepEvents,
    Submission,
    TokenLogprob,
)
from services.gateway.peers import EngineChoice, EngineState, EngineStatus, PlacementAsk

_MICROS_PER_SECOND = 1_000_000

_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    generation_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}
_ENGINE_STATES = {
    engine_pb2.ENGINE_STATE_STARTING: EngineState.STARTING,
    engine_pb2.ENGINE_STATE_READY: EngineState.READY,
    engine_pb2.ENGINE_STATE_DRAINING: EngineState.DRAINING,
}
_REQUEST_STATUSES = {
    RequestStatus.STOP: telemetry_pb2.REQUEST_STATUS_STOP,
    RequestStatus.LENGTH: telemetry_pb2.REQUEST_STATUS_LENGTH,
    RequestStatus.ABORTED: telemetry_pb2.REQUEST_STATUS_ABORTED,
    RequestStatus.REJECTED: telemetry_pb2.REQUEST_STATUS_REJECTED,
    RequestStatus.ERROR: telemetry_pb2.REQUEST_STATUS_ERROR,
    RequestStatus.GATEWAY_LOST: telemetry_pb2.REQUEST_STATUS_GATEWAY_LOST,
}

_MISS_REASONS = {
    generation_pb2.CACHE_MISS_REASON_NOT_SEEN: "not_seen",
    generation_pb2.CACHE_MISS_REASON_EVICTED: "evicted",
    generation_pb2.CACHE_MISS_REASON_BEHIND_GAP: "behind_gap",
    generation_pb2.CACHE_MISS_REASON_TAIL: "tail",
    generation_pb2.CACHE_MISS_REASON_PROMPT_LOGPROBS: "prompt_logprobs",
    generation_pb2.CACHE_MISS_REASON_CACHING_OFF: "caching_off",
}
_STALL_REASONS = {
    generation_pb2.STALL_REASON_PREEMPTION: "preemption",
    generation_pb2.STALL_REASON_PREFILL: "prefill",
    generation_pb2.STALL_REASON_LONG_STEP: "long_step",
    generation_pb2.STALL_REASON_ENGINE_WAIT: "engine_wait",
}


def encode_submit(submission: Submission, remaining_seconds: float) -> generation_pb2.GenerateRequest:
    """Build the command that starts a request."""
    return generation_pb2.GenerateRequest(
        submit=generation_pb2.Submit(
            request_id=submission.request_id,
            tenant_id=submission.tenant_id,
            traceparent=submission.traceparent,
            remaining_time=duration_from_seconds(remaining_seconds),
            prompt_token_ids=submission.prompt_token_ids,
            sampling_params=_encode_sampling_params(submission.sampling_params),
            cache_salt=submission.cache_salt,
            shared_prefix=None
            if submission.shared_prefix is None
            else generation_pb2.SharedPrefix(
                salt=submission.shared_prefix.salt, num_blocks=submission.shared_prefix.num_blocks
            ),
            choices=[
                generation_pb2.ChoiceState(choice_index=choice.index, output_token_ids=choice.output_token_ids)
                for choice in submission.choices
            ],
            priority=submission.priority,
            stall_bound=None
            if submission.stall_bound_seconds is None
            else duration_from_seconds(submission.stall_bound_seconds),
        )
    )


def encode_abort(request_id: str, handles: Sequence[int]) -> generation_pb2.GenerateRequest:
    """Build the command that ends some choices of a request, or all where none is named."""
    return generation_pb2.GenerateRequest(abort=generation_pb2.Abort(request_id=request_id, handles=handles))


def decode_step(message: generation_pb2.GenerateResponse) -> StepEvents:
    """Read everything that a step did."""
    ends: list[tuple[int, GenerationEnd]] = [
        (finished.handle, _decode_finished(finished)) for finished in message.finished
    ]
    ends += [
        (failed.handle, GenerationFailed(error_from_status(failed.status), _decode_usage(failed.usage)))
        for failed in message.failed
    ]
    return StepEvents(
        started=[(started.request_id, list(started.handles)) for started in message.started],
        handles=list(message.handles),
        num_tokens=list(message.num_tokens),
        token_ids=list(message.token_ids),
        ends=ends,
        output_logprobs=_decode_output_logprobs(message) if message.HasField("output_logprobs") else {},
        prompt_logprobs=_decode_prompt_logprobs(message) if message.HasField("prompt_logprobs") else {},
        step_id=message.step_id,
        first_tokens={first.handle: _decode_first_token(first) for first in message.first_tokens},
        accept_seconds={
            started.request_id: seconds_from_duration(started.accept_duration)
            for started in message.started
            if started.HasField("accept_duration")
        },
    )


def encode_enqueue(ask: PlacementAsk, remaining_seconds: float) -> router_pb2.PlaceRequestsRequest:
    """Build the message that asks for a place."""
    return router_pb2.PlaceRequestsRequest(
        enqueue=router_pb2.Enqueue(
            request_id=ask.request_id,
            tenant_id=ask.tenant_id,
            traceparent=ask.traceparent,
            remaining_time=duration_from_seconds(remaining_seconds),
            model_name=ask.model_name,
            num_prompt_tokens=ask.num_prompt_tokens,
            max_output_tokens=ask.max_output_tokens,
            priority=ask.priority,
            prefix_hashes=ask.prefix_hashes,
            hash_contract=_encode_hash_contract(ask.hash_contract),
            excluded_engine_ids=ask.excluded_engine_ids,
        )
    )


def encode_placement_started(request_id: str) -> router_pb2.PlaceRequestsRequest:
    """Build the message that says that the first token came."""
    return router_pb2.PlaceRequestsRequest(started=router_pb2.PlacementStarted(request_id=request_id))


def encode_placement_finished(request_id: str) -> router_pb2.PlaceRequestsRequest:
    """Build the message that gives a place back."""
    return router_pb2.PlaceRequestsRequest(finished=router_pb2.PlacementFinished(request_id=request_id))


def encode_placement_cancelled(request_id: str) -> router_pb2.PlaceRequestsRequest:
    """Build the message that withdraws an ask."""
    return router_pb2.PlaceRequestsRequest(cancelled=router_pb2.PlacementCancelled(request_id=request_id))


def decode_placement(message: router_pb2.PlaceRequestsResponse) -> tuple[str, EngineChoice | OctavoError]:
    """Read a request's id and its place, or why there is none."""
    if message.HasField("placed"):
        placed = message.placed
        return placed.request_id, EngineChoice(engine_id=placed.engine_id, address=placed.address)
    return message.rejected.request_id, error_from_status(message.rejected.status)


def decode_engine(engine: engine_pb2.Engine, load: engine_pb2.EngineLoad, *, address: str | None) -> EngineStatus:
    """Read an engine's identity and load; ``address`` is where it was asked, if it was asked itself."""
    contract = engine.hash_contract
    return EngineStatus(
        engine_id=engine.engine_id,
        address=address or engine.address,
        model_name=engine.model_name,
        state=_ENGINE_STATES.get(engine.state, EngineState.STARTING),
        hash_contract=HashContract(contract.block_size, contract.algorithm, contract.tokenizer_digest),
        max_model_len=engine.max_model_len,
        num_running_requests=load.num_running_requests,
        num_waiting_requests=load.num_waiting_requests,
        num_blocks_used=load.num_blocks - min(load.num_available_blocks, load.num_blocks),
        num_blocks=load.num_blocks,
    )


def decode_engines(message: router_pb2.ListEnginesResponse) -> list[EngineStatus]:
    """Read the engines that a router knows and watches."""
    return [
        decode_engine(status.engine, status.load, address=None) for status in message.engines if status.is_watched
    ]


def encode_batch(batch_id: str, records: Sequence[AuditRecord]) -> telemetry_pb2.IngestEventsRequest:
    """Build a batch of audit records."""
    return telemetry_pb2.IngestEventsRequest(
        batch_id=batch_id, records=[_encode_record(record) for record in records]
    )


def _encode_sampling_params(params: SamplingParams) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_output_tokens=params.max_output_tokens,
        min_output_tokens=params.min_output_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[generation_pb2.TokenSequence(token_ids=word) for word in params.bad_words],
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs,
        grammar=None if params.grammar is None else _encode_grammar(params.grammar),
    )


def _encode_grammar(grammar: Grammar) -> generation_pb2.Grammar:
    match grammar.form:
        case GrammarForm.JSON_SCHEMA:
            return generation_pb2.Grammar(json_schema=grammar.text)
        case GrammarForm.REGEX:
            return generation_pb2.Grammar(regex=grammar.text)
        case GrammarForm.LARK:
            return generation_pb2.Grammar(lark=grammar.text)
        case GrammarForm.CHOICE:
            return generation_pb2.Grammar(choice=generation_pb2.ChoiceList(choices=grammar.texts))


def _decode_output_logprobs(message: generation_pb2.GenerateResponse) -> dict[int, list[TokenLogprob]]:
    counts = dict(zip(message.handles, message.num_tokens, strict=True))
    entries = _decode_token_logprobs(message.output_logprobs.tokens)
    return {handle: list(islice(entries, counts[handle])) for handle in message.output_logprobs.handles}


def _decode_prompt_logprobs(message: generation_pb2.GenerateResponse) -> dict[int, list[TokenLogprob]]:
    prompts = message.prompt_logprobs
    entries = _decode_token_logprobs(prompts.tokens)
    counts = zip(prompts.handles, prompts.num_tokens, strict=True)
    return {handle: list(islice(entries, count)) for handle, count in counts}


def _decode_token_logprobs(tokens: generation_pb2.TokenLogprobs) -> Iterator[TokenLogprob]:
    alternatives = zip(tokens.alternative_token_ids, tokens.alternative_logprobs, strict=True)
    for logprob, rank, count in zip(tokens.logprobs, tokens.ranks, tokens.num_alternatives, strict=True):
        yield TokenLogprob(logprob, rank, tuple(islice(alternatives, count)))


def _decode_finished(finished: generation_pb2.Finished) -> GenerationFinished:
    return GenerationFinished(
        reason=_FINISH_REASONS[finished.reason],
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        usage=_decode_usage(finished.usage),
    )


def _decode_usage(usage: generation_pb2.Usage) -> EngineUsage:
    return EngineUsage(
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_discarded_tokens=usage.num_discarded_tokens,
        num_preemptions=usage.num_preemptions,
        queue_seconds=seconds_from_duration(usage.queue_duration),
        prefill_seconds=seconds_from_duration(usage.prefill_duration),
        decode_seconds=seconds_from_duration(usage.decode_duration),
        stalls=tuple(_decode_stall(stall) for stall in usage.stalls),
        num_stalls=usage.num_stalls,
    )


def _decode_first_token(first: generation_pb2.FirstToken) -> FirstTokenReport:
    return FirstTokenReport(
        queue_seconds=seconds_from_duration(first.queue_duration),
        prefill_seconds=seconds_from_duration(first.prefill_duration),
        num_cached_tokens=first.num_cached_tokens,
        misses={_MISS_REASONS.get(miss.reason, "unknown"): miss.num_tokens for miss in first.misses},
        publish_seconds=seconds_from_duration(first.publish_duration),
        since_started_seconds=seconds_from_duration(first.since_started_duration)
        if first.HasField("since_started_duration")
        else None,
    )


def _decode_stall(stall: generation_pb2.Stall) -> EngineStall:
    return EngineStall(
        step_id=stall.step_id,
        gap_seconds=seconds_from_duration(stall.gap),
        reason=_STALL_REASONS.get(stall.reason, "unknown"),
        step_seconds=seconds_from_duration(stall.step_duration),
        num_prefill_tokens=stall.num_prefill_tokens,
    )


def _encode_hash_contract(contract: HashContract) -> engine_pb2.HashContract:
    return engine_pb2.HashContract(
        block_size=contract.block_size,
        algorithm=contract.algorithm,
        tokenizer_digest=contract.tokenizer_digest,
    )


def _encode_record(record: AuditRecord) -> telemetry_pb2.RequestRecord:
    message = telemetry_pb2.RequestRecord(
        request_id=record.request_id,
        client_request_id=record.client_request_id,
        tenant_id=record.tenant_id,
        model_name=record.model_name,
        endpoint=record.endpoint,
        is_streaming=record.is_streaming,
        status=_REQUEST_STATUSES[record.status],
        error_reason=record.error_reason,
        http_status=record.http_status,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        discarded_tokens=record.discarded_tokens,
        num_preemptions=record.num_preemptions,
        num_retries=record.num_retries,
        accepted_time=_timestamp(record.accepted_time),
        finished_time=_timestamp(record.finished_time),
        queue_duration=duration_from_seconds(record.queue_seconds),
        engine_id=record.engine_id,
        gateway_id=record.gateway_id,
    )
    if record.ttft_seconds is not None:
        message.ttft.CopyFrom(duration_from_seconds(record.ttft_seconds))
    if record.e2e_seconds is not None:
        message.e2e.CopyFrom(duration_from_seconds(record.e2e_seconds))
    if record.mean_itl_seconds is not None:
        message.mean_itl.CopyFrom(duration_from_seconds(record.mean_itl_seconds))
    return message


def _timestamp(unix_seconds: float) -> Timestamp:
    # A float of today's date is good for microseconds; more digits would be noise.
    micros = round(unix_seconds * _MICROS_PER_SECOND)
    return Timestamp(seconds=micros // _MICROS_PER_SECOND, nanos=micros % _MICROS_PER_SECOND * 1_000)
