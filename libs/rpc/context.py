"""What a unary call carries besides its message: request id, tenant and trace context, as metadata."""

from __future__ import annotations

from dataclasses import dataclass

import grpc.aio

_REQUEST_ID, _TENANT_ID, _TRACEPARENT = "x-request-id", "x-tenant-id", "traceparent"


@dataclass(frozen=True, slots=True)
class CallContext:
    """The request on whose behalf a call is made."""

    request_id: str | None = None
    tenant_id: str | None = None
    traceparent: str | None = None

    def as_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return gRPC metadata with what is set."""
        pairs = (
            (_REQUEST_ID, self.request_id),
            (_TENANT_ID, self.tenant_id),
            (_TRACEPARENT, self.traceparent),
        )
        return tuple((key, value) for key, value in pairs if value is not None)


def call_context_of(context: grpc.aio.ServicerContext) -> CallContext:
    """Read the context that the caller sent."""
    metadata = {
        key: value if isinstance(value, str) else value.decode()
        for key, value in (context.invocation_metadata() or ())
    }
    return CallContext(metadata.get(_REQUEST_ID), metadata.get(_TENANT_ID), metadata.get(_TRACEPARENT))
