"""Translation between our errors and google.rpc.Status, in both directions."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from libs.errors import (
    BudgetExhausted,
    Cancelled,
    DeadlineExceeded,
    ErrorReason,
    InternalError,
    OctavoError,
    Overloaded,
    RateLimited,
    spec_of,
)
from libs.errors.table import BY_REASON
from libs.rpc.durations import duration_from_seconds, seconds_from_duration

ERROR_DOMAIN = "octavo"


def status_from_error(error: OctavoError, *, request_id: str | None = None) -> status_pb2.Status:
    """Build a Status with one ErrorInfo and, where useful, RetryInfo, BadRequest, QuotaFailure and RequestInfo."""
    spec = spec_of(error)
    status = status_pb2.Status(code=grpc.StatusCode[spec.grpc_code].value[0], message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=spec.reason.value, domain=ERROR_DOMAIN))
    if error.retry_after_seconds is not None:
        delay: Duration = duration_from_seconds(error.retry_after_seconds)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.param, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, RateLimited | BudgetExhausted):
        excess = error_details_pb2.QuotaFailure.Violation(subject="tenant", description=error.message)
        status.details.add().Pack(error_details_pb2.QuotaFailure(violations=[excess]))
    if request_id is not None:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    return status


def error_from_status(status: status_pb2.Status) -> OctavoError:
    """Rebuild the error that a Status stands for; one without our ErrorInfo becomes InternalError."""
    reason: ErrorReason | None = None
    param: str | None = None
    retry_after_seconds: float | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = ErrorReason(info.reason) if info.reason in ErrorReason.__members__ else None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_seconds = seconds_from_duration(retry.retry_delay)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            param = bad.field_violations[0].field if bad.field_violations else None
    error_class = BY_REASON[reason].error_class if reason is not None else InternalError
    return error_class(status.message, param=param, retry_after_seconds=retry_after_seconds)


def error_from_rpc(error: grpc.aio.AioRpcError, *, on_lost: type[OctavoError]) -> OctavoError:
    """Translate a failed call; a peer that cannot be reached or broke off becomes ``on_lost``."""
    # from_call wants the synchronous interface; AioRpcError answers the same questions.
    call: Any = error
    try:
        status = rpc_status.from_call(call)
    except ValueError:
        status = None
    if status is not None and status.details:
        return error_from_status(status)
    code, detail = error.code(), error.details() or "no details"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"The call did not finish in time: {detail}.")
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(f"The call was cancelled: {detail}.")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(f"The peer refused the call: {detail}.", retry_after_seconds=1.0)
    return on_lost(f"The call failed with {code.name}: {detail}.")


async def abort_with(
    context: grpc.aio.ServicerContext, error: OctavoError, *, request_id: str | None = None
) -> NoReturn:
    """End a servicer's call with the error's full status; ``request_id`` tells a client which request it was."""
    # grpc.aio has no typed abort_with_status; abort with the same trailing metadata is its meaning.
    rich = rpc_status.to_status(status_from_error(error, request_id=request_id))
    await context.abort_with_status(rich)
    raise AssertionError("abort_with_status returned")
