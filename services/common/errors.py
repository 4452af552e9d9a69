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

from typing import ClassVar, TypeVar

import grpc

_Error = TypeVar("_Error", bound=BaseException)

_OF_STATUS: dict[int, tuple[str, grpc.StatusCode]] = {
    400: ("invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    401: ("authentication_error", grpc.StatusCode.UNAUTHENTICATED),
    403: ("invalid_request_error", grpc.StatusCode.PERMISSION_DENIED),
    404: ("invalid_request_error", grpc.StatusCode.NOT_FOUND),
    408: ("timeout_error", grpc.StatusCode.DEADLINE_EXCEEDED),
    413: ("invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    415: ("invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    429: ("rate_limit_error", grpc.StatusCode.RESOURCE_EXHAUSTED),
    431: ("invalid_request_error", grpc.StatusCode.INVALID_ARGUMENT),
    499: ("client_error", grpc.StatusCode.CANCELLED),
    500: ("server_error", grpc.StatusCode.INTERNAL),
    503: ("server_error", grpc.StatusCode.UNAVAILABLE),
    504: ("timeout_error", grpc.StatusCode.DEADLINE_EXCEEDED),
}
"""``type`` in OpenAI's format and gRPC status of an error, by its HTTP status."""
_RETRY_AFTER_S = {429: 1.0, 503: 1.0}
"""Time after which a client should retry, seconds, by HTTP status."""


class ServiceError(Exception):
    """Base of the errors that end a request.

    Args:
        message: explanation for the client.
        param: path of the invalid field, if any.
        retry_after_s: time after which the client should retry, seconds; default: that of the
            status, which is None for errors that a retry does not help.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        default_s = _RETRY_AFTER_S.get(self.status)
        self.retry_after_s = default_s if retry_after_s is None else retry_after_s

    @property
    def grpc_status(self) -> grpc.StatusCode:
        """Status of a gRPC call that ends with the error."""
        return _OF_STATUS[self.status][1]

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the error as a response body in OpenAI's format."""
        return {
            "error": {
                "message": self.message,
                "type": _OF_STATUS[self.status][0],
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(ServiceError):
    """The request is invalid; ``param`` names the field."""

    status, code = 400, "invalid_value"


class Unauthenticated(ServiceError):
    """The API key is missing or wrong."""

    status, code = 401, "invalid_api_key"


class Forbidden(ServiceError):
    """The ``Host`` header has a name that the server does not accept."""

    status, code = 403, "host_not_allowed"


class ModelNotFound(ServiceError):
    """The requested model is not served."""

    status, code = 404, "model_not_found"


class QueueTimeout(ServiceError):
    """The request reached its maximum time in the queue."""

    status, code = 408, "queue_timeout"


class TooLarge(ServiceError):
    """A body exceeds its limit."""

    status, code = 413, "request_too_large"


class UnsupportedMediaType(ServiceError):
    """The body of an HTTP request is not declared as JSON."""

    status, code = 415, "unsupported_media_type"


class Overloaded(ServiceError):
    """The queues are full."""

    status, code = 429, "overloaded"


class ClientGone(ServiceError):
    """The client disconnected. The error is only logged."""

    status, code = 499, "client_closed_request"


class Unavailable(ServiceError):
    """No worker can take the request now."""

    status, code = 503, "unavailable"


class DeadlineExceeded(ServiceError):
    """The request's deadline passed."""

    status, code = 504, "deadline_exceeded"


class OutputNotFinite(ServiceError):
    """The model's logits for the request are NaN or infinite, so that no token can be sampled."""

    code = "output_not_finite"


class InternalFault(ServiceError):
    """An internal error of the service, not caused by the client."""


class SettingsError(Exception):
    """A service cannot start with its settings."""


def detached(error: _Error) -> _Error:
    """Return an error without its traceback and without the error that it was raised from.

    Their frames hold the request. An error that the state of a call stores would keep them in
    memory until a garbage collection.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
