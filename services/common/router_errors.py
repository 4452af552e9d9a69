"""Error codes and error bodies of the router's HTTP API; see `services.common.placement`."""

from enum import StrEnum

from services.common.messages import Message


class ErrorCode(StrEnum):
    """Error codes of the router, with their HTTP status."""

    INVALID = "invalid"  # 400; 403: not allowed Host; 415: the body is not JSON
    UNAUTHENTICATED = "unauthenticated"  # 401
    UNKNOWN_MODEL = "unknown_model"  # 404
    NOT_FOUND = "not_found"  # 404 or 405: no such path or method
    QUEUE_TIMEOUT = "queue_timeout"  # 408
    STALE_EPOCH = "stale_epoch"  # 409: the epoch has ended or was replaced
    RELEASED = "released"  # 409: the placement was released before it was made
    TOO_LARGE = "too_large"  # 413: the request fits no worker, or the body is too long
    QUEUE_FULL = "queue_full"  # 429
    INTERNAL = "internal"  # 500
    NO_WORKERS = "no_workers"  # 503
    STARTING = "starting"  # 503: workers may not have registered with the router yet
    CLOSING = "closing"  # 503: the router is shutting down


class RouterErrorDetail(Message):
    """Code and message of an error."""

    code: ErrorCode
    message: str


class RouterError(Message):
    """Body of every error."""

    error: RouterErrorDetail
