"""Responses of the router's HTTP API: JSON bodies, and the bodies of errors."""

from dataclasses import dataclass

from pydantic import BaseModel
from werkzeug.exceptions import HTTPException

from services.common.router_errors import ErrorCode, RouterError, RouterErrorDetail
from services.router.errors import RouterException

CONTENT_TYPE = "application/json"

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


def refusal(error: RouterException, retry_after_s: int) -> Answer:
    """Return the response to a request that is refused.

    Args:
        retry_after_s: ``Retry-After`` of errors that have none of their own.
    """
    wait_s = (error.retry_after_s or retry_after_s) if error.retry else None
    return _error(error.status, error.code, str(error), wait_s)


def http_error(error: HTTPException) -> Answer:
    """Return the response to a request that is invalid as HTTP, or has an unknown path."""
    status = error.code or 500
    default = ErrorCode.INVALID if status < 500 else ErrorCode.INTERNAL
    return _error(status, _HTTP_CODES.get(status, default), error.description or error.name)


def internal_error() -> Answer:
    """Return the response to a request that failed because of a bug, without details."""
    return _error(500, ErrorCode.INTERNAL, "internal error")


def _error(status: int, code: ErrorCode, message: str, retry_after_s: int | None = None) -> Answer:
    body = RouterError(error=RouterErrorDetail(code=code, message=message))
    return Answer(body.model_dump_json(), status, retry_after_s)
