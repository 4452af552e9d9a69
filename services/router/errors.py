"""Errors of the router's HTTP API.

RouterException         body: `RouterError`
├── InvalidBody         400  invalid
├── Unauthenticated     401  unauthenticated
├── UnknownModel        404  unknown_model
├── QueueTimeout        408  queue_timeout
├── StaleEpoch          409  stale_epoch
├── Released            409  released
├── TooLarge            413  too_large
├── QueueFull           429  queue_full, with Retry-After
├── NoWorkers           503  no_workers, with Retry-After
├── Starting            503  starting, with Retry-After
└── Closing             503  closing, with Retry-After
"""

from typing import ClassVar

from services.common.router_errors import ErrorCode


class RouterException(Exception):
    """Base of the errors that refuse a call. If ``retry``, the same call may succeed later.

    Args:
        retry_after_s: time after which to retry, seconds; default: that of the settings.
    """

    status: ClassVar[int]
    code: ClassVar[ErrorCode]
    retry: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidBody(RouterException):
    """The body does not match its model in `services.common.placement` or the settings."""

    status, code = 400, ErrorCode.INVALID


class Unauthenticated(RouterException):
    """The cluster token is missing or wrong."""

    status, code = 401, ErrorCode.UNAUTHENTICATED


class UnknownModel(RouterException):
    """No worker serves the model."""

    status, code = 404, ErrorCode.UNKNOWN_MODEL


class QueueTimeout(RouterException):
    """The call reached its maximum time in the queue."""

    status, code = 408, ErrorCode.QUEUE_TIMEOUT


class StaleEpoch(RouterException):
    """The worker's epoch has ended or was replaced by a newer one."""

    status, code = 409, ErrorCode.STALE_EPOCH


class Released(RouterException):
    """The placement was released before it was made, or its id was used before."""

    status, code = 409, ErrorCode.RELEASED


class TooLarge(RouterException):
    """The request would not fit any worker even if it were idle, or the body is too long."""

    status, code = 413, ErrorCode.TOO_LARGE


class QueueFull(RouterException):
    """The call cannot be queued or would wait too long, or too many workers are registered."""

    status, code, retry = 429, ErrorCode.QUEUE_FULL, True


class NoWorkers(RouterException):
    """No compatible pair of workers is ready, suspect or on probation."""

    status, code, retry = 503, ErrorCode.NO_WORKERS, True


class Starting(RouterException):
    """No registered worker takes the call, but the router has just started: others may register."""

    status, code, retry = 503, ErrorCode.STARTING, True


class Closing(RouterException):
    """The router is shutting down. Another router, or this one after a restart, takes the call."""

    status, code, retry = 503, ErrorCode.CLOSING, True
