"""The table of errors as data: class, reason, gRPC code, HTTP status, OpenAI type and code, retry."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from libs.errors import tree


class ErrorReason(StrEnum):
    """Machine-readable cause; octavo.errors.v1.ErrorReason without its prefix."""

    INVALID_REQUEST = "INVALID_REQUEST"
    UNSUPPORTED_FIELD = "UNSUPPORTED_FIELD"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    REQUEST_NEVER_FITS = "REQUEST_NEVER_FITS"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    ROUTE_NOT_FOUND = "ROUTE_NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    UNSUPPORTED_MEDIA_TYPE = "UNSUPPORTED_MEDIA_TYPE"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    OVERLOADED = "OVERLOADED"
    NO_ENGINE_AVAILABLE = "NO_ENGINE_AVAILABLE"
    DRAINING = "DRAINING"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    ENGINE_LOST = "ENGINE_LOST"
    WORKER_LOST = "WORKER_LOST"
    INVALID_LOGITS = "INVALID_LOGITS"
    HASH_CONTRACT_MISMATCH = "HASH_CONTRACT_MISMATCH"
    MODEL_LOAD_FAILED = "MODEL_LOAD_FAILED"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    INTERNAL = "INTERNAL"
    DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
    TEMPLATE_REFUSED = "TEMPLATE_REFUSED"
    RATE_LIMITED = "RATE_LIMITED"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    PERMISSION_DENIED = "PERMISSION_DENIED"


@dataclass(frozen=True, slots=True)
class ErrorSpec:
    """How one class of errors looks on each wire."""

    error_class: type[tree.OctavoError]
    reason: ErrorReason
    grpc_code: str
    http_status: int
    http_type: str
    http_code: str | None
    is_retryable: bool


_CLIENT, _SERVER = "invalid_request_error", "server_error"
# OpenAI's clients know these by type and by code.
_RATE, _QUOTA = "rate_limit_exceeded", "insufficient_quota"

ERROR_TABLE: tuple[ErrorSpec, ...] = tuple(
    ErrorSpec(*row)
    for row in (
        # class, reason, gRPC code, HTTP status, OpenAI type, OpenAI code, retry elsewhere or later
        (tree.InvalidRequest, ErrorReason.INVALID_REQUEST, "INVALID_ARGUMENT", 400, _CLIENT, None, False),
        (tree.UnsupportedField, ErrorReason.UNSUPPORTED_FIELD, "INVALID_ARGUMENT", 400, _CLIENT, "unsupported_field", False),
        (tree.ContextLengthExceeded, ErrorReason.CONTEXT_LENGTH_EXCEEDED, "INVALID_ARGUMENT", 400, _CLIENT, "context_length_exceeded", False),
        (tree.RequestNeverFits, ErrorReason.REQUEST_NEVER_FITS, "INVALID_ARGUMENT", 400, _CLIENT, "request_never_fits", False),
        (tree.TemplateRefused, ErrorReason.TEMPLATE_REFUSED, "INVALID_ARGUMENT", 400, _CLIENT, "template_refused", False),
        (tree.DuplicateRequest, ErrorReason.DUPLICATE_REQUEST, "ALREADY_EXISTS", 409, _CLIENT, "duplicate_request", False),
        (tree.ModelNotFound, ErrorReason.MODEL_NOT_FOUND, "NOT_FOUND", 404, _CLIENT, "model_not_found", False),
        (tree.RouteNotFound, ErrorReason.ROUTE_NOT_FOUND, "UNIMPLEMENTED", 404, _CLIENT, "route_not_found", False),
        (tree.MethodNotAllowed, ErrorReason.METHOD_NOT_ALLOWED, "UNIMPLEMENTED", 405, _CLIENT, "method_not_allowed", False),
        (tree.PayloadTooLarge, ErrorReason.PAYLOAD_TOO_LARGE, "INVALID_ARGUMENT", 413, _CLIENT, "payload_too_large", False),
        (tree.UnsupportedMediaType, ErrorReason.UNSUPPORTED_MEDIA_TYPE, "INVALID_ARGUMENT", 415, _CLIENT, "unsupported_media_type", False),
        (tree.Unauthenticated, ErrorReason.UNAUTHENTICATED, "UNAUTHENTICATED", 401, _CLIENT, "invalid_api_key", False),
        (tree.PermissionDenied, ErrorReason.PERMISSION_DENIED, "PERMISSION_DENIED", 403, _CLIENT, "permission_denied", False),
        (tree.Overloaded, ErrorReason.OVERLOADED, "RESOURCE_EXHAUSTED", 503, _SERVER, "overloaded", True),
        (tree.RateLimited, ErrorReason.RATE_LIMITED, "RESOURCE_EXHAUSTED", 429, _RATE, _RATE, True),
        (tree.BudgetExhausted, ErrorReason.BUDGET_EXHAUSTED, "RESOURCE_EXHAUSTED", 429, _QUOTA, _QUOTA, True),
        (tree.NoEngineAvailable, ErrorReason.NO_ENGINE_AVAILABLE, "UNAVAILABLE", 503, _SERVER, "no_engine_available", True),
        (tree.Draining, ErrorReason.DRAINING, "UNAVAILABLE", 503, _SERVER, "draining", True),
        (tree.EngineLost, ErrorReason.ENGINE_LOST, "UNAVAILABLE", 502, _SERVER, "engine_lost", True),
        (tree.WorkerLost, ErrorReason.WORKER_LOST, "UNAVAILABLE", 502, _SERVER, "worker_lost", True),
        (tree.StoreUnavailable, ErrorReason.STORE_UNAVAILABLE, "UNAVAILABLE", 503, _SERVER, "store_unavailable", True),
        (tree.DeadlineExceeded, ErrorReason.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", 504, _SERVER, "deadline_exceeded", False),
        (tree.Cancelled, ErrorReason.CANCELLED, "CANCELLED", 499, _CLIENT, "cancelled", False),
        (tree.InvalidLogits, ErrorReason.INVALID_LOGITS, "INTERNAL", 500, _SERVER, "invalid_logits", False),
        (tree.HashContractMismatch, ErrorReason.HASH_CONTRACT_MISMATCH, "FAILED_PRECONDITION", 500, _SERVER, "hash_contract_mismatch", False),
        (tree.ModelLoadFailed, ErrorReason.MODEL_LOAD_FAILED, "FAILED_PRECONDITION", 500, _SERVER, "model_load_failed", False),
        (tree.InternalError, ErrorReason.INTERNAL, "INTERNAL", 500, _SERVER, "internal_error", False),
    )
)  # fmt: skip

_BY_CLASS = {spec.error_class: spec for spec in ERROR_TABLE}
BY_REASON = {spec.reason: spec for spec in ERROR_TABLE}


def spec_of(error: tree.OctavoError | type[tree.OctavoError]) -> ErrorSpec:
    """Return the row of an error or of its class.

    Raises:
        KeyError: for a class that groups others and is never raised itself.
    """
    return _BY_CLASS[error if isinstance(error, type) else type(error)]
