"""Every error that Octavo names, as one tree.

    OctavoError
    ├── ClientError                     the request is wrong; sending it again does not help
    │   ├── InvalidRequest              ├── UnsupportedField      ├── ContextLengthExceeded
    │   ├── RequestNeverFits            ├── TemplateRefused       ├── DuplicateRequest
    │   ├── ModelNotFound               ├── RouteNotFound         ├── MethodNotAllowed
    │   ├── PayloadTooLarge             ├── UnsupportedMediaType  ├── Unauthenticated
    │   └── PermissionDenied
    ├── UnavailableError                not now; the same request may succeed later
    │   ├── Overloaded                  ├── NoEngineAvailable     ├── Draining
    │   ├── EngineLost                  ├── WorkerLost            ├── StoreUnavailable
    │   ├── RateLimited                 └── BudgetExhausted
    ├── EndedFromOutside                the caller's time or interest ended
    │   ├── DeadlineExceeded            └── Cancelled
    └── FaultError                      a fault of ours
        ├── InvalidLogits               ├── HashContractMismatch
        └── ModelLoadFailed             └── InternalError

Owns the classes and the table that maps each to its gRPC code, reason, HTTP status and OpenAI type. It
must not know gRPC, HTTP libraries or any tier: translation happens once at each edge.
"""

from libs.errors.table import ERROR_TABLE, ErrorReason, ErrorSpec, spec_of
from libs.errors.tree import (
    BudgetExhausted,
    Cancelled,
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EndedFromOutside,
    EngineLost,
    FaultError,
    HashContractMismatch,
    InternalError,
    InvalidLogits,
    InvalidRequest,
    MethodNotAllowed,
    ModelLoadFailed,
    ModelNotFound,
    NoEngineAvailable,
    OctavoError,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    RateLimited,
    RequestNeverFits,
    RouteNotFound,
    StoreUnavailable,
    TemplateRefused,
    Unauthenticated,
    UnavailableError,
    UnsupportedField,
    UnsupportedMediaType,
    WorkerLost,
)

__all__ = [
    "ERROR_TABLE",
    "BudgetExhausted",
    "Cancelled",
    "ClientError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Draining",
    "DuplicateRequest",
    "EndedFromOutside",
    "EngineLost",
    "ErrorReason",
    "ErrorSpec",
    "FaultError",
    "HashContractMismatch",
    "InternalError",
    "InvalidLogits",
    "InvalidRequest",
    "MethodNotAllowed",
    "ModelLoadFailed",
    "ModelNotFound",
    "NoEngineAvailable",
    "OctavoError",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "RateLimited",
    "RequestNeverFits",
    "RouteNotFound",
    "StoreUnavailable",
    "TemplateRefused",
    "Unauthenticated",
    "UnavailableError",
    "UnsupportedField",
    "UnsupportedMediaType",
    "WorkerLost",
    "spec_of",
]
