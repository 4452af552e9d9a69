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
    """Base of the errors that refuse a call.

    Args:
        retry_after_s: time after which to retry, seconds; default: that of the settings.
    """

    code: ClassVar[ErrorCode]

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidBody(RouterException):
    """The body does not match its model in `services.common.placement` or the settings."""

    code = ErrorCode.INVALID


class Unauthenticated(RouterException):
    """The cluster token is missing or wrong."""

    code = ErrorCode.UNAUTHENTICATED


class UnknownModel(RouterException):
    """No worker serves the model."""

    code = ErrorCode.UNKNOWN_MODEL


class QueueTimeout(RouterException):
    """The call reached its maximum time in the queue."""

    code = ErrorCode.QUEUE_TIMEOUT


class StaleEpoch(RouterException):
    """The worker's epoch has ended or was replaced by a newer one."""

    code = ErrorCode.STALE_EPOCH


class Released(RouterException):
    """The placement was released before it was made, or its id was used before."""

    code = ErrorCode.RELEASED


class TooLarge(RouterException):
    """The request would not fit any worker even if it were idle, or the body is too long."""

    code = ErrorCode.TOO_LARGE


class QueueFull(RouterException):
    """The call cannot be queued or would wait too long, or too many workers are registered."""

    code = ErrorCode.QUEUE_FULL


class NoWorkers(RouterException):
    """No compatible pair of workers is ready, suspect or on probation."""

    code = ErrorCode.NO_WORKERS


class Starting(RouterException):
    """No registered worker takes the call, but the router has just started: others may register."""

    code = ErrorCode.STARTING


class Closing(RouterException):
    """The router is shutting down. Another router, or this one after a restart, takes the call."""

    code = ErrorCode.CLOSING
