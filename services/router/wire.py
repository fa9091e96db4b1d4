"""Translation between the protos of router and engine and the router's own types.

The only place, with servicer and clients, that knows generated code. What cannot be used is refused here.
"""

from __future__ import annotations

import math

from libs.errors import InternalError, InvalidRequest
from libs.kv import HashContract, PrefixHash
from libs.kv.prefix_hash import HASH_BYTES
from libs.protogen.engine.v1 import engine_pb2
from libs.protogen.router.v1 import router_pb2
from libs.rpc import duration_from_seconds, seconds_from_duration, status_from_error
from services.router.engine_directory import EngineStatus
from services.router.engine_events import SnapshotHead, SnapshotPart, WatchEvent
from services.router.placement import Answer, Placed
from services.router.policy.facts import (
    EngineCapacity,
    EngineId,
    EngineIdentity,
    EngineLoad,
    EngineState,
    PlacementRequest,
    ScoredCandidate,
)
from services.router.prefix_index import BlockChanges

_STATES = {
    engine_pb2.ENGINE_STATE_STARTING: EngineState.STARTING,
    engine_pb2.ENGINE_STATE_READY: EngineState.READY,
    engine_pb2.ENGINE_STATE_DRAINING: EngineState.DRAINING,
}
_WIRE_STATES = {state: number for number, state in _STATES.items()}


def placement_request_from_wire(message: router_pb2.Enqueue) -> PlacementRequest:
    """Parse an Enqueue.

    Raises:
        InvalidRequest: for one that no gateway of ours would send; ``param`` names the field.
    """
    if not message.request_id:
        raise InvalidRequest("request_id must not be empty.", param="request_id")
    if not message.model_name:
        raise InvalidRequest("model_name must not be empty.", param="model_name")
    if message.num_prompt_tokens == 0:
        raise InvalidRequest("num_prompt_tokens must be at least 1.", param="num_prompt_tokens")
    contract = hash_contract_from_wire(message.hash_contract) if message.HasField("hash_contract") else None
    _check_hashes(message, contract)
    return PlacementRequest(
        request_id=message.request_id,
        tenant_id=message.tenant_id,
        traceparent=message.traceparent if message.HasField("traceparent") else None,
        priority=message.priority,
        remaining_seconds=(
            seconds_from_duration(message.remaining_time) if message.HasField("remaining_time") else None
        ),
        model_name=message.model_name,
        num_prompt_tokens=message.num_prompt_tokens,
        max_output_tokens=message.max_output_tokens,
        prefix_hashes=tuple(map(PrefixHash, message.prefix_hashes)),
        hash_contract=contract,
        excluded_engine_ids=frozenset(map(EngineId, message.excluded_engine_ids)),
    )


def _check_hashes(message: router_pb2.Enqueue, contract: HashContract | None) -> None:
    if not message.prefix_hashes:
        return
    if contract is None or contract.block_size == 0:
        raise InvalidRequest("prefix_hashes need a hash_contract with a block size.", param="hash_contract")
    if len(message.prefix_hashes) * contract.block_size > message.num_prompt_tokens:
        raise InvalidRequest(
            f"{len(message.prefix_hashes)} blocks of {contract.block_size} tokens are more than the prompt's "
            f"{message.num_prompt_tokens}.",
            param="prefix_hashes",
        )
    if any(len(prefix_hash) != HASH_BYTES for prefix_hash in message.prefix_hashes):
        raise InvalidRequest(f"Each prefix hash must have {HASH_BYTES} bytes.", param="prefix_hashes")


def answer_to_wire(answer: Answer) -> router_pb2.PlaceRequestsResponse:
    """Build the message that answers an Enqueue."""
    if isinstance(answer, Placed):
        return router_pb2.PlaceRequestsResponse(placed=_placed_to_wire(answer))
    rejected = router_pb2.Rejected(request_id=answer.request_id, status=status_from_error(answer.error))
    return router_pb2.PlaceRequestsResponse(rejected=rejected)


def _placed_to_wire(placed: Placed) -> router_pb2.Placed:
    candidate = placed.chosen.candidate
    identity = candidate.engine.identity
    return router_pb2.Placed(
        request_id=placed.request_id,
        engine_id=identity.engine_id,
        address=identity.address,
        incarnation=identity.incarnation,
        expected_cached_tokens=candidate.forecast.num_cached_tokens,
        predicted_ttft=duration_from_seconds(candidate.forecast.wait_seconds),
        candidates=[_score_to_wire(scored) for scored in placed.candidates],
    )


def _score_to_wire(scored: ScoredCandidate) -> router_pb2.CandidateScore:
    return router_pb2.CandidateScore(
        engine_id=scored.candidate.engine.engine_id,
        score=scored.score,
        scores={share.name: share.score for share in scored.shares},
    )


def status_to_wire(status: EngineStatus) -> router_pb2.EngineStatus:
    """Build the listing of one engine."""
    return router_pb2.EngineStatus(
        engine=_engine_to_wire(status.identity, status.state),
        load=_load_to_wire(status.load) if status.load else None,
        is_watched=status.is_watched,
        num_indexed_hashes=status.num_indexed_hashes,
        num_placed_requests=status.num_placed_requests,
    )


def _engine_to_wire(identity: EngineIdentity, state: EngineState) -> engine_pb2.Engine:
    contract = identity.hash_contract
    engine = engine_pb2.Engine(
        engine_id=identity.engine_id,
        incarnation=identity.incarnation,
        address=identity.address,
        model_name=identity.model_name,
        hash_contract=engine_pb2.HashContract(
            block_size=contract.block_size,
            algorithm=contract.algorithm,
            tokenizer_digest=contract.tokenizer_digest,
        ),
        state=_WIRE_STATES[state],
        gpu_type=identity.gpu_type,
        total_vram_bytes=identity.total_vram_bytes,
        tensor_parallel_size=identity.tensor_parallel_size,
    )
    if identity.capacity is not None:
        engine.num_blocks = identity.capacity.num_blocks
        engine.max_model_len = identity.capacity.max_model_len
        engine.max_num_seqs = identity.capacity.max_num_seqs
        engine.max_num_batched_tokens = identity.capacity.max_num_batched_tokens
    return engine


def _load_to_wire(load: EngineLoad) -> engine_pb2.EngineLoad:
    return engine_pb2.EngineLoad(
        num_running_requests=load.num_running_requests,
        num_waiting_requests=load.num_waiting_requests,
        num_pending_prefill_tokens=load.num_pending_prefill_tokens,
        num_available_blocks=load.num_available_blocks,
        num_blocks=load.num_blocks,
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        decode_step_duration=(
            None if load.decode_step_seconds is None else duration_from_seconds(load.decode_step_seconds)
        ),
        state=_WIRE_STATES[load.state],
    )


def watch_event_from_wire(message: engine_pb2.WatchEngineResponse) -> WatchEvent:
    """Parse one message of a watch.

    Raises:
        InternalError: for one that no engine of ours would send.
    """
    return WatchEvent(message.incarnation, message.sequence_number, _change_from_wire(message))


def _change_from_wire(message: engine_pb2.WatchEngineResponse) -> SnapshotPart | EngineLoad | BlockChanges:
    match message.WhichOneof("event"):
        case "snapshot":
            return _snapshot_from_wire(message.snapshot)
        case "load":
            return _load_from_wire(message.load)
        case "block_changes":
            changes = message.block_changes
            return BlockChanges(
                removed_hashes=tuple(map(PrefixHash, changes.removed_hashes)),
                stored_hashes=tuple(map(PrefixHash, changes.stored_hashes)),
                is_cleared=changes.is_cleared,
            )
        case other:
            raise InternalError(f"The engine sent an event that this router does not know: {other}.")


def _snapshot_from_wire(snapshot: engine_pb2.EngineSnapshot) -> SnapshotPart:
    head = None
    if snapshot.is_first_part:
        load = _load_from_wire(snapshot.load) if snapshot.HasField("load") else None
        state = load.state if load else _state_from_wire(snapshot.engine.state)
        head = SnapshotHead(_identity_from_wire(snapshot.engine, state), state, load)
    return SnapshotPart(head, tuple(map(PrefixHash, snapshot.prefix_hashes)), snapshot.is_last_part)


def _identity_from_wire(engine: engine_pb2.Engine, state: EngineState) -> EngineIdentity:
    if not engine.engine_id:
        raise InternalError("The engine sent no engine_id.")
    sizes = (engine.num_blocks, engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens)
    if state is EngineState.READY and 0 in (*sizes, engine.hash_contract.block_size):
        raise InternalError(
            f"{engine.engine_id} is ready, but num_blocks, max_model_len, max_num_seqs, max_num_batched_tokens are "
            f"{', '.join(map(str, sizes))}, and block_size is {engine.hash_contract.block_size}."
        )
    capacity = EngineCapacity(
        num_blocks=engine.num_blocks,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )
    return EngineIdentity(
        engine_id=EngineId(engine.engine_id),
        incarnation=engine.incarnation,
        address=engine.address,
        model_name=engine.model_name,
        hash_contract=hash_contract_from_wire(engine.hash_contract),
        # An engine whose workers still load does not know its sizes.
        capacity=None if 0 in sizes else capacity,
        gpu_type=engine.gpu_type,
        total_vram_bytes=engine.total_vram_bytes,
        tensor_parallel_size=engine.tensor_parallel_size,
    )


def _load_from_wire(load: engine_pb2.EngineLoad) -> EngineLoad:
    rate = load.prefill_tokens_per_second if load.HasField("prefill_tokens_per_second") else None
    decode_step_seconds = None
    if load.HasField("decode_step_duration"):
        # What no clock measures would make waits that nothing can be divided by.
        decode_step_seconds = max(0.0, seconds_from_duration(load.decode_step_duration))
    return EngineLoad(
        state=_state_from_wire(load.state),
        num_running_requests=load.num_running_requests,
        num_waiting_requests=load.num_waiting_requests,
        num_pending_prefill_tokens=load.num_pending_prefill_tokens,
        num_available_blocks=load.num_available_blocks,
        num_blocks=load.num_blocks,
        # A rate that nothing can be divided by has not been measured.
        prefill_tokens_per_second=rate if rate is not None and rate > 0 and math.isfinite(rate) else None,
        decode_step_seconds=decode_step_seconds,
    )


def _state_from_wire(state: engine_pb2.EngineState.ValueType) -> EngineState:
    if state not in _STATES:
        raise InternalError(f"The engine sent a state that this router does not know: {state}.")
    return _STATES[state]


def hash_contract_from_wire(contract: engine_pb2.HashContract) -> HashContract:
    """Parse what two parties agree on."""
    return HashContract(contract.block_size, contract.algorithm, contract.tokenizer_digest)
