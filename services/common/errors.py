"""Errors of the services with their HTTP and gRPC statuses.

ServiceError                     base of the errors that end a request
├── InvalidRequest               400  INVALID_ARGUMENT
├── Unauthenticated              401  UNAUTHENTICATED
├── Forbidden                    403  PERMISSION_DENIED    the Host header names another server
├── ModelNotFound                404  NOT_FOUND
├── QueueTimeout                 408  DEADLINE_EXCEEDED    waited too long in the queue
├── TooLarge                     413  INVALID_ARGUMENT     body exceeds a limit
├── UnsupportedMediaType         415  INVALID_ARGUMENT     the body is not application/json
├── Overloaded                   429  RESOURCE_EXHAUSTED   with Retry-After
├── ClientGone                   499  CANCELLED            logged only
├── Unavailable                  503  UNAVAILABLE          no workers, or draining; with Retry-After
├── DeadlineExceeded             504  DEADLINE_EXCEEDED
├── OutputNotFinite              500  INTERNAL             the model's logits are NaN or infinite
└── InternalFault                500  INTERNAL
SettingsError                    a service cannot start with its settings
"""

from typing import ClassVar

import grpc


class ServiceError(Exception):
    """Base of the errors that end a request.

    Args:
        message: explanation for the client.
        param: path of the invalid field, if any.
        retry_after_s: time after which the client should retry, seconds; default: that of the
            class, which is None for errors that a retry does not help.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    default_retry_after_s: ClassVar[float | None] = None
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the error as a response body in OpenAI's format."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(ServiceError):
    """The request is invalid; ``param`` names the field."""

    status, kind, code = 400, "invalid_request_error", "invalid_value"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class Unauthenticated(ServiceError):
    """The API key is missing or wrong."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"
    grpc_status = grpc.StatusCode.UNAUTHENTICATED


class Forbidden(ServiceError):
    """The ``Host`` header has a name that the server does not accept."""

    status, kind, code = 403, "invalid_request_error", "host_not_allowed"
    grpc_status = grpc.StatusCode.PERMISSION_DENIED


class ModelNotFound(ServiceError):
    """The requested model is not served."""

    status, kind, code = 404, "invalid_request_error", "model_not_found"
    grpc_status = grpc.StatusCode.NOT_FOUND


class QueueTimeout(ServiceError):
    """The request reached its maximum time in the queue."""

    status, kind, code = 408, "timeout_error", "queue_timeout"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class TooLarge(ServiceError):
    """A body exceeds its limit."""

    status, kind, code = 413, "invalid_request_error", "request_too_large"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class UnsupportedMediaType(ServiceError):
    """The body of an HTTP request is not declared as JSON."""

    status, kind, code = 415, "invalid_request_error", "unsupported_media_type"
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT


class Overloaded(ServiceError):
    """The queues are full."""

    status, kind, code = 429, "rate_limit_error", "overloaded"
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_retry_after_s = 1.0


class ClientGone(ServiceError):
    """The client disconnected. The error is only logged."""

    status, kind, code = 499, "client_error", "client_closed_request"
    grpc_status = grpc.StatusCode.CANCELLED


class Unavailable(ServiceError):
    """No worker can take the request now."""

    status, kind, code = 503, "server_error", "unavailable"
    grpc_status = grpc.StatusCode.UNAVAILABLE
    default_retry_after_s = 1.0


class DeadlineExceeded(ServiceError):
    """The request's deadline passed."""

    status, kind, code = 504, "timeout_error", "deadline_exceeded"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class OutputNotFinite(ServiceError):
    """The model's logits for the request are NaN or infinite, so that no token can be sampled."""

    code = "output_not_finite"


class InternalFault(ServiceError):
    """An internal error of the service, not caused by the client."""


class SettingsError(Exception):
    """A service cannot start with its settings."""
