"""What comes over the wire is parsed into types that cannot be wrong, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from libs.errors import InternalError, InvalidRequest, Overloaded
from libs.protogen.engine.v1 import engine_pb2
from libs.protogen.router.v1 import router_pb2
from libs.rpc import duration_from_seconds, error_from_status
from services.router.engine_events import SnapshotPart
from services.router.placement import Placed, Rejected
from services.router.policy.facts import (
    Candidate,
    EngineLoad,
    EngineState,
    Forecast,
    PlacementRequest,
    ScoredCandidate,
    ScorerShare,
)
from services.router.prefix_index import BlockChanges
from services.router.wire import answer_to_wire, placement_request_from_wire, watch_event_from_wire
from tests.unit.router.builders import CONTRACT, chain, facts, identity

WIRE_CONTRACT = engine_pb2.HashContract(
    block_size=CONTRACT.block_size, algorithm=CONTRACT.algorithm, tokenizer_digest=CONTRACT.tokenizer_digest
)


def enqueue() -> router_pb2.Enqueue:
    return router_pb2.Enqueue(
        request_id="r",
        tenant_id="t",
        traceparent="00-trace",
        priority=-3,
        remaining_time=duration_from_seconds(1.5),
        model_name="model",
        num_prompt_tokens=40,
        max_output_tokens=7,
        prefix_hashes=chain(2),
        hash_contract=WIRE_CONTRACT,
        excluded_engine_ids=["e"],
    )


def test_parses_an_enqueue() -> None:
    assert placement_request_from_wire(enqueue()) == PlacementRequest(
        request_id="r",
        tenant_id="t",
        traceparent="00-trace",
        priority=-3,
        remaining_seconds=1.5,
        model_name="model",
        num_prompt_tokens=40,
        max_output_tokens=7,
        prefix_hashes=chain(2),
        hash_contract=CONTRACT,
        excluded_engine_ids=frozenset(["e"]),  # type: ignore[list-item]  # A plain str is an EngineId at run time.
    )


def test_what_is_unset_is_none() -> None:
    parsed = placement_request_from_wire(
        router_pb2.Enqueue(request_id="r", model_name="model", num_prompt_tokens=1)
    )

    assert parsed.traceparent is None
    assert parsed.remaining_seconds is None
    assert parsed.hash_contract is None


@pytest.mark.parametrize(
    ("spoil", "param"),
    [
        (lambda message: message.ClearField("request_id"), "request_id"),
        (lambda message: message.ClearField("model_name"), "model_name"),
        (lambda message: message.ClearField("num_prompt_tokens"), "num_prompt_tokens"),
        (lambda message: message.ClearField("hash_contract"), "hash_contract"),
        (lambda message: message.hash_contract.ClearField("block_size"), "hash_contract"),
        (lambda message: message.prefix_hashes.append(b"x" * 31), "prefix_hashes"),
        (lambda message: message.prefix_hashes.extend(chain(1)), "prefix_hashes"),
    ],
)
def test_refuses_an_enqueue_that_no_gateway_would_send(
    spoil: Callable[[router_pb2.Enqueue], None], param: str
) -> None:
    message = enqueue()
    spoil(message)

    with pytest.raises(InvalidRequest) as refusal:
        placement_request_from_wire(message)

    assert refusal.value.param == param


def test_a_place_carries_who_where_why_and_how_soon() -> None:
    engine = facts(engine=identity("engine-1", incarnation=9))
    scored = ScoredCandidate(Candidate(engine, Forecast(0.25, 32)), 0.75, (ScorerShare("predicted_wait", 0.75),))

    placed = answer_to_wire(Placed("r", scored, (scored,))).placed

    assert (placed.request_id, placed.engine_id, placed.address) == ("r", "engine-1", "engine-1:1")
    assert (placed.incarnation, placed.expected_cached_tokens) == (9, 32)
    assert placed.predicted_ttft == duration_from_seconds(0.25)
    assert placed.candidates[0].score == 0.75
    assert dict(placed.candidates[0].scores) == {"predicted_wait": 0.75}


def test_a_rejection_says_when_to_come_back() -> None:
    message = answer_to_wire(Rejected("r", Overloaded("Full.", retry_after_seconds=3.5)))

    error = error_from_status(message.rejected.status)
    assert message.rejected.request_id == "r"
    assert isinstance(error, Overloaded)
    assert error.retry_after_seconds == 3.5


def engine(**fields: object) -> engine_pb2.Engine:
    message = engine_pb2.Engine(
        engine_id="e",
        incarnation=1,
        model_name="model",
        hash_contract=WIRE_CONTRACT,
        state=engine_pb2.ENGINE_STATE_READY,
        num_blocks=10,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def without_block_size() -> engine_pb2.Engine:
    message = engine()
    message.hash_contract.block_size = 0
    return message


def snapshot_of(message: engine_pb2.Engine, load: engine_pb2.EngineLoad | None = None) -> SnapshotPart:
    event = watch_event_from_wire(
        engine_pb2.WatchEngineResponse(
            incarnation=1,
            snapshot=engine_pb2.EngineSnapshot(engine=message, load=load, is_first_part=True, is_last_part=True),
        )
    )
    assert isinstance(event.change, SnapshotPart)
    return event.change


def test_the_state_in_the_load_is_the_newer_one() -> None:
    part = snapshot_of(engine(), engine_pb2.EngineLoad(state=engine_pb2.ENGINE_STATE_DRAINING))

    assert part.head is not None
    assert part.head.state is EngineState.DRAINING


def test_a_starting_engine_may_not_know_its_sizes() -> None:
    part = snapshot_of(engine(state=engine_pb2.ENGINE_STATE_STARTING, num_blocks=0))

    assert part.head is not None
    assert part.head.identity.capacity is None


@pytest.mark.parametrize(
    "message",
    [
        engine(num_blocks=0),
        engine(engine_id=""),
        engine(state=engine_pb2.ENGINE_STATE_UNSPECIFIED),
        without_block_size(),
    ],
)
def test_refuses_a_snapshot_that_no_engine_would_send(message: engine_pb2.Engine) -> None:
    with pytest.raises(InternalError):
        snapshot_of(message)


def test_refuses_an_event_without_content() -> None:
    with pytest.raises(InternalError):
        watch_event_from_wire(engine_pb2.WatchEngineResponse(incarnation=1))


@pytest.mark.parametrize(("rate", "parsed"), [(None, None), (0.0, None), (float("nan"), None), (12.5, 12.5)])
def test_a_rate_that_was_not_measured_is_none(rate: float | None, parsed: float | None) -> None:
    load = engine_pb2.EngineLoad(state=engine_pb2.ENGINE_STATE_READY, prefill_tokens_per_second=rate)

    event = watch_event_from_wire(engine_pb2.WatchEngineResponse(incarnation=1, sequence_number=4, load=load))

    assert isinstance(event.change, EngineLoad)
    assert event.change.prefill_tokens_per_second == parsed
    assert event.change.decode_step_seconds is None


def test_a_step_never_takes_less_than_no_time() -> None:
    load = engine_pb2.EngineLoad(state=engine_pb2.ENGINE_STATE_READY)
    load.decode_step_duration.seconds = -1

    event = watch_event_from_wire(engine_pb2.WatchEngineResponse(incarnation=1, sequence_number=4, load=load))

    assert isinstance(event.change, EngineLoad)
    assert event.change.decode_step_seconds == 0.0


def test_parses_block_changes() -> None:
    changes = engine_pb2.BlockChanges(removed_hashes=chain(1), stored_hashes=chain(2), is_cleared=True)

    event = watch_event_from_wire(
        engine_pb2.WatchEngineResponse(incarnation=3, sequence_number=4, block_changes=changes)
    )

    assert (event.incarnation, event.sequence_number) == (3, 4)
    assert event.change == BlockChanges(chain(1), chain(2), is_cleared=True)
