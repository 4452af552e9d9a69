"""The error of the router's HTTP API."""

from services.common.router_errors import ErrorCode


class Refusal(Exception):
    """A call is refused, with the error code of its answer.

    Args:
        retry_after_s: time after which to retry, seconds; default: that of the settings.
    """

    def __init__(self, code: ErrorCode, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
