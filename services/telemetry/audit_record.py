"""What the audit knows of a request: the types that pass through telemetry.

Owns the record, the batch, and their form in the spool. It must not know the wire's messages or the table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NewType
from uuid import UUID

import msgspec

BatchId = NewType("BatchId", UUID)


class RequestStatus(StrEnum):
    """How a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    REJECTED = "rejected"
    ERROR = "error"
    GATEWAY_LOST = "gateway_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One request from its acceptance to its end. Times are in UTC."""

    request_id: UUID
    client_request_id: str
    tenant_id: str
    model_name: str
    endpoint: str
    is_streaming: bool
    status: RequestStatus
    error_reason: str
    http_status: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    discarded_tokens: int
    num_preemptions: int
    num_retries: int
    accepted_time: datetime
    finished_time: datetime | None
    ttft_seconds: float | None
    mean_itl_seconds: float | None
    e2e_seconds: float | None
    queue_seconds: float | None
    engine_id: str
    gateway_id: str


@dataclass(frozen=True, slots=True)
class AuditBatch:
    """Records that a gateway sends together; the same `batch_id` at every attempt."""

    batch_id: BatchId
    records: tuple[AuditRecord, ...]


def encode_records(records: Sequence[AuditRecord]) -> bytes:
    """Encode records for the spool."""
    return _ENCODER.encode(records)


def decode_records(data: bytes) -> tuple[AuditRecord, ...]:
    """Decode what `encode_records` made; raises ValueError for anything else."""
    return _DECODER.decode(data)


def insert_token(records: Sequence[AuditRecord]) -> str:
    """Name an insert by its content, so that the same rows have the same name at every attempt."""
    return hashlib.blake2b(encode_records(records), digest_size=16).hexdigest()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[AuditRecord, ...])
