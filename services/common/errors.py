"""The error tree of the services, and its translation at the edges.

ServiceError                     what ends a request, with a code a client can act on
├── InvalidRequest               400  INVALID_ARGUMENT     the request itself is wrong
├── Unauthenticated              401  UNAUTHENTICATED
├── ModelNotFound                404  NOT_FOUND
├── QueueTimeout                 408  DEADLINE_EXCEEDED    waited too long to be placed
├── TooLarge                     413  INVALID_ARGUMENT     body or prompt past a bound
├── Overloaded                   429  RESOURCE_EXHAUSTED   with Retry-After
├── ClientGone                   499  CANCELLED            log only
├── Unavailable                  503  UNAVAILABLE          no workers, draining; with Retry-After
├── DeadlineExceeded             504  DEADLINE_EXCEEDED
└── InternalFault                500  INTERNAL             ours, not the client's
SettingsError                    a service cannot start as it was told
"""

from typing import ClassVar

import grpc


class ServiceError(Exception):
    """Ends a request. ``param`` names the offending field; ``retry_after_s`` invites a retry."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error as OpenAI's API shapes it."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(ServiceError):
    """The request itself is wrong; ``param`` says where."""

    status, kind, code = 400, "invalid_request_error", "invalid_value"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class Unauthenticated(ServiceError):
    """No key, or a wrong one."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"
    grpc_status = grpc.StatusCode.UNAUTHENTICATED


class ModelNotFound(ServiceError):
    """A model nobody here serves."""

    status, kind, code = 404, "invalid_request_error", "model_not_found"
    grpc_status = grpc.StatusCode.NOT_FOUND


class QueueTimeout(ServiceError):
    """Waited for a place as long as allowed."""

    status, kind, code = 408, "timeout_error", "queue_timeout"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class TooLarge(ServiceError):
    """A body or prompt past its bound."""

    status, kind, code = 413, "invalid_request_error", "request_too_large"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class Overloaded(ServiceError):
    """Queues are full; come back after ``retry_after_s``."""

    status, kind, code = 429, "rate_limit_error", "overloaded"
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED


class ClientGone(ServiceError):
    """The client left; nobody reads this but the log."""

    status, kind, code = 499, "client_error", "client_closed_request"
    grpc_status = grpc.StatusCode.CANCELLED


class Unavailable(ServiceError):
    """Nobody can serve this now."""

    status, kind, code = 503, "server_error", "unavailable"
    grpc_status = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(ServiceError):
    """The request's deadline passed."""

    status, kind, code = 504, "timeout_error", "deadline_exceeded"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class InternalFault(ServiceError):
    """A fault of ours, after every retry that was safe."""


class SettingsError(Exception):
    """A service cannot start as it was told."""
