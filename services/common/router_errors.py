"""Error codes and error bodies of the router's HTTP API; see `services.common.placement`."""

from enum import StrEnum

from services.common.messages import Message


class ErrorCode(StrEnum):
    """Error codes of the router, with their HTTP status.

    Attributes:
        INVALID: 400, the body does not match its model in `services.common.placement` or the
            settings; 403, the Host header is not allowed; 415, the body is not JSON.
        UNAUTHENTICATED: 401, the cluster token is missing or wrong.
        UNKNOWN_MODEL: 404, no worker serves the model.
        NOT_FOUND: 404 or 405, there is no such path or method.
        QUEUE_TIMEOUT: 408, the call reached its maximum time in the queue.
        STALE_EPOCH: 409, the worker's epoch has ended or was replaced by a newer one.
        RELEASED: 409, the placement was released before it was made, or its id was used before.
        TOO_LARGE: 413, the request would not fit any worker even if it were idle, or the body is
            too long.
        QUEUE_FULL: 429, the call cannot be queued or would wait too long, or too many workers are
            registered.
        INTERNAL: 500, a bug.
        NO_WORKERS: 503, no compatible pair of workers is ready, suspect or on probation.
        STARTING: 503, no registered worker takes the call, but the router has just started: others
            may register.
        CLOSING: 503, the router is shutting down. Another router, or this one after a restart,
            takes the call.
    """

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    UNKNOWN_MODEL = "unknown_model"
    NOT_FOUND = "not_found"
    QUEUE_TIMEOUT = "queue_timeout"
    STALE_EPOCH = "stale_epoch"
    RELEASED = "released"
    TOO_LARGE = "too_large"
    QUEUE_FULL = "queue_full"
    INTERNAL = "internal"
    NO_WORKERS = "no_workers"
    STARTING = "starting"
    CLOSING = "closing"


class RouterErrorDetail(Message):
    """Code and message of an error."""

    code: ErrorCode
    message: str


class RouterError(Message):
    """Body of every error."""

    error: RouterErrorDetail
