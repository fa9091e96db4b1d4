"""One request's row in the audit, from its acceptance to its end. Owns no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestStatus(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    REJECTED = "rejected"
    ERROR = "error"
    GATEWAY_LOST = "gateway_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """What is known of a request when it is accepted; written before it is placed."""

    request_id: str
    client_request_id: str
    tenant_id: str
    model_name: str
    endpoint: str
    is_streaming: bool
    accepted_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """What happened to a request; times are Unix seconds, durations are None where there was nothing to measure."""

    request_id: str
    client_request_id: str
    tenant_id: str
    model_name: str
    endpoint: str
    is_streaming: bool
    accepted_time: float
    finished_time: float
    status: RequestStatus
    gateway_id: str
    error_reason: str = ""
    http_status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    discarded_tokens: int = 0
    num_preemptions: int = 0
    num_retries: int = 0
    ttft_seconds: float | None = None
    mean_itl_seconds: float | None = None
    e2e_seconds: float | None = None
    queue_seconds: float = 0.0
    engine_id: str = ""

    @classmethod
    def gateway_lost(cls, accepted: AcceptedRequest, *, gateway_id: str, now: float) -> AuditRecord:
        """Close a request whose gateway died before it ended."""
        return cls(
            request_id=accepted.request_id,
            client_request_id=accepted.client_request_id,
            tenant_id=accepted.tenant_id,
            model_name=accepted.model_name,
            endpoint=accepted.endpoint,
            is_streaming=accepted.is_streaming,
            accepted_time=accepted.accepted_time,
            finished_time=now,
            status=RequestStatus.GATEWAY_LOST,
            gateway_id=gateway_id,
        )
