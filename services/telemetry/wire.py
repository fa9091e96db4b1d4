"""From messages of octavo.telemetry.v1 to the audit's own types; nothing wrong gets past here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from google.protobuf.timestamp_pb2 import Timestamp

from libs.errors import InvalidRequest
from libs.protogen.telemetry.v1 import telemetry_pb2
from libs.rpc import seconds_from_duration
from services.telemetry.audit_record import AuditBatch, AuditRecord, BatchId, RequestStatus

MAX_RECORDS: Final = 1_000
MAX_TEXT_CHARS: Final = 1_024
MAX_HTTP_STATUS: Final = 599

_STATUSES: Final = {
    telemetry_pb2.REQUEST_STATUS_STOP: RequestStatus.STOP,
    telemetry_pb2.REQUEST_STATUS_LENGTH: RequestStatus.LENGTH,
    telemetry_pb2.REQUEST_STATUS_ABORTED: RequestStatus.ABORTED,
    telemetry_pb2.REQUEST_STATUS_REJECTED: RequestStatus.REJECTED,
    telemetry_pb2.REQUEST_STATUS_ERROR: RequestStatus.ERROR,
    telemetry_pb2.REQUEST_STATUS_GATEWAY_LOST: RequestStatus.GATEWAY_LOST,
}
_TEXT_FIELDS: Final = (
    "client_request_id tenant_id model_name endpoint error_reason engine_id gateway_id".split()  # noqa: SIM905
)
# The table's times are good for these years; a time outside them is a mistake in any case.
_FIRST_YEAR: Final = 2000
_LAST_YEAR: Final = 2200


def batch_from_wire(message: telemetry_pb2.IngestEventsRequest) -> AuditBatch:
    """Parse a batch; raises InvalidRequest that names the field."""
    batch_id = _uuid(message.batch_id, "batch_id")
    if not 1 <= len(message.records) <= MAX_RECORDS:
        raise InvalidRequest(
            f"A batch has 1 to {MAX_RECORDS} records, not {len(message.records)}; split it.", param="records"
        )
    records = tuple(_record(record, f"records[{index}]") for index, record in enumerate(message.records))
    return AuditBatch(BatchId(batch_id), records)


def _record(message: telemetry_pb2.RequestRecord, path: str) -> AuditRecord:
    status = _STATUSES.get(message.status)
    if status is None:
        raise InvalidRequest(f"{path}.status {message.status} is not known here.", param=f"{path}.status")
    for field in _TEXT_FIELDS:
        if len(getattr(message, field)) > MAX_TEXT_CHARS:
            raise InvalidRequest(f"{path}.{field} is over {MAX_TEXT_CHARS} characters.", param=f"{path}.{field}")
    if message.http_status > MAX_HTTP_STATUS:
        raise InvalidRequest(
            f"{path}.http_status {message.http_status} is no HTTP status.", param=f"{path}.http_status"
        )
    if not message.HasField("accepted_time"):
        raise InvalidRequest(f"{path}.accepted_time is missing.", param=f"{path}.accepted_time")
    return AuditRecord(
        request_id=_uuid(message.request_id, f"{path}.request_id"),
        client_request_id=message.client_request_id,
        tenant_id=message.tenant_id,
        model_name=message.model_name,
        endpoint=message.endpoint,
        is_streaming=message.is_streaming,
        status=status,
        error_reason=message.error_reason,
        http_status=message.http_status,
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        completion_tokens=message.completion_tokens,
        discarded_tokens=message.discarded_tokens,
        num_preemptions=message.num_preemptions,
        num_retries=message.num_retries,
        accepted_time=_time(message.accepted_time, f"{path}.accepted_time"),
        finished_time=_time(message.finished_time, f"{path}.finished_time")
        if message.HasField("finished_time")
        else None,
        ttft_seconds=_seconds(message, "ttft", path),
        mean_itl_seconds=_seconds(message, "mean_itl", path),
        e2e_seconds=_seconds(message, "e2e", path),
        queue_seconds=_seconds(message, "queue_duration", path),
        engine_id=message.engine_id,
        gateway_id=message.gateway_id,
    )


def _uuid(text: str, path: str) -> UUID:
    try:
        return UUID(text)
    except ValueError as error:
        raise InvalidRequest(f"{path} must be a UUID, not {text[:64]!r}.", param=path) from error


def _time(timestamp: Timestamp, path: str) -> datetime:
    try:
        time = timestamp.ToDatetime(tzinfo=UTC)
    except ValueError as error:
        raise InvalidRequest(f"{path} is no point in time: {error}.", param=path) from error
    if not _FIRST_YEAR <= time.year < _LAST_YEAR:
        raise InvalidRequest(f"{path} lies in the year {time.year}; check the clock of the gateway.", param=path)
    return time


def _seconds(message: telemetry_pb2.RequestRecord, field: str, path: str) -> float | None:
    if not message.HasField(field):  # type: ignore[arg-type]  # The stub wants a literal.
        return None
    seconds = seconds_from_duration(getattr(message, field))
    if seconds < 0:
        raise InvalidRequest(f"{path}.{field} is negative.", param=f"{path}.{field}")
    return seconds
