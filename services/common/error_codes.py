"""Error codes that services exchange: their names, and how a gateway handles each."""

from dataclasses import dataclass
from enum import Enum, auto

from headrace.v1 import error_pb2
from services.common.errors import (
    DeadlineExceeded,
    InternalFault,
    InvalidRequest,
    OutputNotFinite,
    ServiceError,
)


class Cause(Enum):
    """The cause that ended an attempt at a request.

    Unless the cause is the request itself, the gateway retries the request on other workers.

    Attributes:
        REQUEST: the request itself. No worker is reported to the router.
        CONGESTION: overload. No worker is reported.
        REFUSAL: a full or draining worker. It is reported, but not as a failure.
        FAULT: failure of a worker, which is reported.
        LOSS: end of a worker's process. It is reported, and counts as a lost worker.
    """

    REQUEST = auto()
    CONGESTION = auto()
    REFUSAL = auto()
    FAULT = auto()
    LOSS = auto()


@dataclass(frozen=True)
class Verdict:
    """Handling of an error code by a gateway.

    Attributes:
        error: error that ends the request; None if the request is retried.
    """

    cause: Cause
    error: type[ServiceError] | None = None

    @property
    def blames_worker(self) -> bool:
        """Whether the worker that the error names is reported to the router."""
        return self.cause not in (Cause.REQUEST, Cause.CONGESTION)


VERDICTS: "dict[error_pb2.ErrorCode.ValueType, Verdict]" = {
    error_pb2.ERROR_CODE_UNSPECIFIED: Verdict(Cause.LOSS),  # the connection to the worker was lost
    error_pb2.ERROR_CODE_INVALID: Verdict(Cause.REQUEST, InvalidRequest),
    error_pb2.ERROR_CODE_OVERLOADED: Verdict(Cause.REFUSAL),
    error_pb2.ERROR_CODE_DRAINING: Verdict(Cause.REFUSAL),
    error_pb2.ERROR_CODE_INCOMPATIBLE: Verdict(Cause.FAULT),
    error_pb2.ERROR_CODE_PREFILL_LOST: Verdict(Cause.LOSS),
    error_pb2.ERROR_CODE_TRANSFER_FAILED: Verdict(Cause.FAULT),
    error_pb2.ERROR_CODE_INTEGRITY: Verdict(Cause.FAULT),
    error_pb2.ERROR_CODE_LEASE_EXPIRED: Verdict(Cause.CONGESTION),
    error_pb2.ERROR_CODE_DEADLINE: Verdict(Cause.REQUEST, DeadlineExceeded),
    error_pb2.ERROR_CODE_CANCELLED: Verdict(Cause.REQUEST, InternalFault),
    error_pb2.ERROR_CODE_INTERNAL: Verdict(Cause.FAULT),
    error_pb2.ERROR_CODE_NOT_FINITE: Verdict(Cause.REQUEST, OutputNotFinite),
    error_pb2.ERROR_CODE_NOT_CACHED: Verdict(Cause.CONGESTION),  # no worker sends it to gateways
}
"""The verdict on every error code. A gateway treats a code that it does not know as INTERNAL."""
UNREACHED = Verdict(Cause.FAULT)
"""The verdict if the gateway was not connected to the worker: the request did not reach it."""


def error_reason(code: "error_pb2.ErrorCode.ValueType") -> str:
    """Return the name of an error code for labels, such as ``prefill_lost``."""
    if code not in error_pb2.ErrorCode.values():
        return "unknown"
    return error_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_").lower()
