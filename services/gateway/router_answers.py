"""Answers of routers to the call that places a request."""

from http import HTTPStatus
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from services.common.encoder_placement import EncodePlacement
from services.common.errors import (
    InternalFault,
    Overloaded,
    QueueTimeout,
    ServiceError,
    TooLarge,
    Unavailable,
)
from services.common.placement import Placement
from services.common.router_errors import ErrorCode, RouterError


class ExceedsWorkers(TooLarge):
    """The KV cache of every worker is smaller than prompt and output together.

    For the client, the context length is exceeded, as in `ContextLengthExceeded`.
    """

    status, code = 400, "context_length_exceeded"

    def __init__(self, reason: str) -> None:
        super().__init__(
            "This model's maximum context length is limited by the memory of the workers. However, "
            f"you requested more: {reason}. Please reduce the length of the prompt or completion.",
            param="prompt",
        )


class NoRouter(Unavailable):
    """No router takes calls now: each is unreachable, shuts down or waits for its workers."""


P = TypeVar("P", Placement, EncodePlacement)


def parse_answer(
    response: aiohttp.ClientResponse, body: bytes, placement_id: str, answer: type[P]
) -> P | ServiceError:
    """Return the placement, or the refusal as the error of the request.

    Args:
        answer: class of the placement.

    Raises:
        ServiceError: if the answer is not that of a router. The request may have been placed.
    """
    try:
        if response.status != HTTPStatus.OK:
            return _refusal(response, RouterError.model_validate_json(body))
        placement = answer.model_validate_json(body)
    except ValidationError as error:
        if response.status != HTTPStatus.OK:
            raise Unavailable(f"a router answered with HTTP status {response.status}") from None
        raise InternalFault(f"invalid placement from a router: {error}") from error
    if placement.placement_id != placement_id:
        raise InternalFault("invalid placement from a router: it has another id")
    return placement


def _refusal(response: aiohttp.ClientResponse, refusal: RouterError) -> ServiceError:
    detail = refusal.error
    retry_after_s = _retry_after(response)
    match detail.code:
        case ErrorCode.QUEUE_TIMEOUT:
            return QueueTimeout(detail.message)
        case ErrorCode.QUEUE_FULL:
            return Overloaded(detail.message, retry_after_s=retry_after_s)
        case ErrorCode.TOO_LARGE:
            return ExceedsWorkers(detail.message)
        case ErrorCode.UNAUTHENTICATED:  # another router may accept the token
            return Unavailable("a router refuses the cluster token of this gateway")
        case ErrorCode.STARTING | ErrorCode.CLOSING:
            return NoRouter(detail.message, retry_after_s=retry_after_s)
        case ErrorCode.NO_WORKERS | ErrorCode.UNKNOWN_MODEL | ErrorCode.INTERNAL:
            return Unavailable(detail.message, retry_after_s=retry_after_s)
        case _:
            return InternalFault(f"the router refused: {detail.message}")


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    try:
        return float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None
