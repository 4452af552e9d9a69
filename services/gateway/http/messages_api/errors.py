"""Errors in the form of Anthropic's API, for the paths of that API."""

from typing import Any

from services.common.errors import ServiceError
from services.gateway.request_errors import ContextLengthExceeded

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


def error_content(message: str, status: int, request_id: str) -> dict[str, Any]:
    """Return the body of an error."""
    error = {"type": _TYPES.get(status, "invalid_request_error"), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def error_message(error: ServiceError) -> str:
    """Return the message of an error, in Anthropic's wording where clients recognize it.

    Claude Code, for example, repeats a request with less `max_tokens`, or shortens the
    conversation.
    """
    if not isinstance(error, ContextLengthExceeded):
        return error.message
    prompt, limit = error.prompt_tokens, error.context_length
    if prompt > limit:
        return f"prompt is too long: {prompt} tokens > {limit} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {error.max_tokens} > "
        f"{limit}, decrease input length or `max_tokens` and try again"
    )
