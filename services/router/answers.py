"""Responses of the router's HTTP API: JSON bodies, and the bodies of errors."""

from dataclasses import dataclass

import structlog
from pydantic import BaseModel
from werkzeug.exceptions import HTTPException

from services.common.router_errors import ErrorCode, RouterError, RouterErrorDetail
from services.router.errors import Refusal

log = structlog.get_logger()

CONTENT_TYPE = "application/json"

_STATUSES = {
    ErrorCode.INVALID: 400,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.UNKNOWN_MODEL: 404,
    ErrorCode.QUEUE_TIMEOUT: 408,
    ErrorCode.STALE_EPOCH: 409,
    ErrorCode.RELEASED: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.NO_WORKERS: 503,
    ErrorCode.STARTING: 503,
    ErrorCode.CLOSING: 503,
}
"""HTTP status of a refusal, by its code."""
_RETRIED = (429, 503)
"""Statuses of refusals after which the same call may succeed later: they have a Retry-After."""
_HTTP_CODES = {404: ErrorCode.NOT_FOUND, 405: ErrorCode.NOT_FOUND, 413: ErrorCode.TOO_LARGE}


@dataclass(frozen=True)
class Answer:
    """A response with a JSON body.

    Attributes:
        retry_after_s: value of ``Retry-After``, seconds; None for a response without this header.
    """

    body: str = "{}"
    status: int = 200
    retry_after_s: int | None = None


def answer(message: BaseModel | None) -> Answer:
    """Return the response whose body is ``message``, or an empty object for None."""
    return Answer() if message is None else Answer(message.model_dump_json())


def error_answer(error: Exception, path: str, retry_after_s: int) -> Answer:
    """Return the response to a request that failed. One to a bug is logged, and has no details.

    Args:
        path: path of the request.
        retry_after_s: ``Retry-After`` of refusals that have none of their own.
    """
    if isinstance(error, Refusal):
        status = _STATUSES[error.code]
        wait_s = (error.retry_after_s or retry_after_s) if status in _RETRIED else None
        return _error(status, error.code, str(error), wait_s)
    if isinstance(error, HTTPException):
        status = error.code or 500
        default = ErrorCode.INVALID if status < 500 else ErrorCode.INTERNAL
        return _error(status, _HTTP_CODES.get(status, default), error.description or error.name)
    log.error("request failed", path=path, exc_info=error)
    return _error(500, ErrorCode.INTERNAL, "internal error")


def _error(status: int, code: ErrorCode, message: str, retry_after_s: int | None = None) -> Answer:
    body = RouterError(error=RouterErrorDetail(code=code, message=message))
    return Answer(body.model_dump_json(), status, retry_after_s)
