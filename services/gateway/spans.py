"""Spans of the gateway. Attributes are named by OpenTelemetry's semantic conventions.

No span has a prompt, an output or a stop string.
"""

from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from services.common.errors import ServiceError
from services.common.placement import Outcome
from services.common.tracing import MAX_TEXT_CHARS, NO_SPAN, Kind, Span, begin
from services.gateway.requests import GenerationRequest
from services.gateway.router_client import RoutedPlacement


def http_span(scope: Scope, headers: Headers, request_id: str) -> Span:
    """Start the span of a POST request; return `NO_SPAN` for others, such as probes."""
    if scope["method"] != "POST":
        return NO_SPAN
    attributes = {
        "http.request.method": "POST",
        "url.path": scope["path"][:MAX_TEXT_CHARS],
        "url.scheme": scope["scheme"],
        "headrace.request.id": request_id,
    }
    return begin("POST", headers.getlist, attributes)


def rpc_span(method: str, metadata: Any, request_id: str) -> Span:
    """Start the span of a gRPC call."""

    def values(name: str) -> list[str]:
        return [value for key, value in metadata or () if key == name and isinstance(value, str)]

    attributes = {
        "rpc.system.name": "grpc",
        "rpc.method": method,
        "headrace.request.id": request_id,
    }
    return begin(method, values, attributes)


def end_request(span: Span, status: int, error: ServiceError | None) -> None:
    """End the span of a request. As for HTTP servers, statuses below 500 are not failures.

    Args:
        status: HTTP status of the response or, for gRPC, the equivalent one.
    """
    if error is not None and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.fail(error.code, error.message)
    elif error is not None:
        span.set({"error.type": error.code})
    span.end()


def generation_span(request: GenerationRequest, model: str) -> Span:
    """Start the span of the generation for one prompt, with all of its attempts."""
    parent, options = request.context.span, request.options
    if not parent.recording:
        return parent
    operation = "chat" if request.chat else "text_completion"
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.choice.count": options.n,
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
        "gen_ai.request.top_k": float(options.top_k),
        "gen_ai.request.presence_penalty": options.presence_penalty,
        "gen_ai.request.frequency_penalty": options.frequency_penalty,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "headrace.request.id": request.context.request_id,
    }
    return parent.child(f"{operation} {model}", Kind.INTERNAL, attributes)


def attempt_span(parent: Span, routed: RoutedPlacement, attempt: int) -> Span:
    """Start the span of one attempt on a pair of workers."""
    if not parent.recording:
        return parent
    placement = routed.placement
    attributes: dict[str, str | int] = {
        "headrace.attempt": attempt,
        "headrace.decode_worker": placement.decode.worker_id,
    }
    if placement.prefill is not None:
        attributes["headrace.prefill_worker"] = placement.prefill.worker_id
    return parent.child("attempt", Kind.CLIENT, attributes)


def end_attempt(span: Span, outcome: Outcome, blame: str | None) -> None:
    """End the span of an attempt.

    Args:
        blame: id of the worker that failed, if it is known.
    """
    span.set({"headrace.outcome": outcome.value})
    if blame is not None:
        span.set({"headrace.failed_worker": blame})
    span.end()
