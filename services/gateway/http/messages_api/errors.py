"""Errors in the form of Anthropic's API, for the paths of that API."""

from collections.abc import Mapping
from typing import Any

PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""``type`` of errors by status. All others are ``invalid_request_error``."""


def is_messages_path(path: str) -> bool:
    """Return whether errors of a path have the form of Anthropic's API."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_content(body: Mapping[str, Any], status: int, request_id: str) -> dict[str, Any]:
    """Return the body of an error.

    Args:
        body: body of the error in OpenAI's format.
    """
    kind = _TYPES.get(status, "invalid_request_error")
    error = {"type": kind, "message": body["error"]["message"]}
    return {"type": "error", "error": error, "request_id": request_id}
