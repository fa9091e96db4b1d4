"""gRPC between tiers: channels, servers with health and reflection, streams that end, errors that arrive.

Owns how calls are made, cancelled and translated to ``libs.errors``. It must not know any service.
"""

from libs.rpc.calls import RpcStream, make_channel, open_stream, unary
from libs.rpc.context import CallContext, call_context_of
from libs.rpc.durations import duration_from_seconds, seconds_from_duration
from libs.rpc.server import Registration, RpcServer, make_server
from libs.rpc.statuses import abort_with, error_from_status, status_from_error

__all__ = [
    "CallContext",
    "Registration",
    "RpcServer",
    "RpcStream",
    "abort_with",
    "call_context_of",
    "duration_from_seconds",
    "error_from_status",
    "make_channel",
    "make_server",
    "open_stream",
    "seconds_from_duration",
    "status_from_error",
    "unary",
]
