"""From the wire to the audit's types: all fields arrive, nothing wrong gets in."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from uuid import UUID

import pytest

from libs.errors import InvalidRequest
from libs.protogen.telemetry.v1 import telemetry_pb2
from services.telemetry.audit_record import RequestStatus
from services.telemetry.wire import batch_from_wire

BATCH_ID = "0b6f3f7e-6f0e-4a55-8d50-1f6f3a0d9f11"
REQUEST_ID = "9d7b8f0a-2f7b-4b44-9a55-0a5b6c7d8e9f"
ACCEPTED = datetime(2026, 5, 17, 12, 30, 0, 125_000, tzinfo=UTC)


def make_message() -> telemetry_pb2.IngestEventsRequest:
    record = telemetry_pb2.RequestRecord(
        request_id=REQUEST_ID,
        client_request_id="client-1",
        tenant_id="tenant",
        model_name="model",
        endpoint="/v1/chat/completions",
        is_streaming=True,
        status=telemetry_pb2.REQUEST_STATUS_LENGTH,
        error_reason="",
        http_status=200,
        prompt_tokens=1,
        cached_tokens=2,
        completion_tokens=3,
        discarded_tokens=4,
        num_preemptions=5,
        num_retries=6,
        engine_id="engine-0",
        gateway_id="gateway-0",
    )
    record.accepted_time.FromDatetime(ACCEPTED)
    record.ttft.FromMilliseconds(250)
    record.e2e.FromMilliseconds(0)
    return telemetry_pb2.IngestEventsRequest(batch_id=BATCH_ID, records=[record])


def test_every_field_arrives_and_what_is_unset_is_none() -> None:
    batch = batch_from_wire(make_message())

    (record,) = batch.records
    assert batch.batch_id == UUID(BATCH_ID)
    assert record.request_id == UUID(REQUEST_ID)
    assert record.status is RequestStatus.LENGTH
    assert record.accepted_time == ACCEPTED
    assert (record.client_request_id, record.tenant_id, record.model_name) == ("client-1", "tenant", "model")
    assert (record.engine_id, record.gateway_id, record.endpoint) == (
        "engine-0",
        "gateway-0",
        "/v1/chat/completions",
    )
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (1, 2, 3)
    assert (record.discarded_tokens, record.num_preemptions, record.num_retries) == (4, 5, 6)
    assert (record.http_status, record.is_streaming, record.error_reason) == (200, True, "")
    assert (record.ttft_seconds, record.e2e_seconds) == (0.25, 0.0)
    assert (record.finished_time, record.mean_itl_seconds, record.queue_seconds) == (None, None, None)


@pytest.mark.parametrize("value", [v for v in telemetry_pb2.RequestStatus.values() if v])
def test_every_status_but_unspecified_is_known(value: telemetry_pb2.RequestStatus.ValueType) -> None:
    message = make_message()
    message.records[0].status = value

    name = telemetry_pb2.RequestStatus.Name(value).removeprefix("REQUEST_STATUS_").lower()
    assert batch_from_wire(message).records[0].status == name


def set_record(**values: object) -> Callable[[telemetry_pb2.IngestEventsRequest], None]:
    def change(message: telemetry_pb2.IngestEventsRequest) -> None:
        for name, value in values.items():
            setattr(message.records[0], name, value)

    return change


def set_seconds(field: str, seconds: int) -> Callable[[telemetry_pb2.IngestEventsRequest], None]:
    return lambda message: setattr(getattr(message.records[0], field), "seconds", seconds)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (lambda message: setattr(message, "batch_id", ""), "batch_id"),
        (lambda message: setattr(message, "batch_id", "not a uuid"), "batch_id"),
        (lambda message: message.ClearField("records"), "records"),
        (lambda message: message.records.extend([message.records[0]] * 1_000), "records"),
        (set_record(request_id="7"), "records[0].request_id"),
        (set_record(status=telemetry_pb2.REQUEST_STATUS_UNSPECIFIED), "records[0].status"),
        (set_record(status=77), "records[0].status"),
        (set_record(tenant_id="x" * 1_025), "records[0].tenant_id"),
        (set_record(client_request_id="x" * 1_025), "records[0].client_request_id"),
        (set_record(http_status=70_000), "records[0].http_status"),
        (lambda message: message.records[0].ClearField("accepted_time"), "records[0].accepted_time"),
        (set_seconds("accepted_time", 0), "records[0].accepted_time"),
        (set_seconds("accepted_time", 10**15), "records[0].accepted_time"),
        (set_seconds("finished_time", 10**10), "records[0].finished_time"),
        (set_seconds("ttft", -1), "records[0].ttft"),
        (set_seconds("queue_duration", -1), "records[0].queue_duration"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(
    change: Callable[[telemetry_pb2.IngestEventsRequest], None], param: str
) -> None:
    message = make_message()
    change(message)

    with pytest.raises(InvalidRequest) as caught:
        batch_from_wire(message)

    assert caught.value.param == param
