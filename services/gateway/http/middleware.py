"""HTTP middleware: request ids, error responses, metrics, logs, disconnects."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from http import HTTPStatus
from typing import Any

import orjson
import structlog
from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import ClientGone, InternalFault, ServiceError, detached
from services.common.tracing import Span
from services.gateway.gateway import valid_request_id
from services.gateway.http.messages_api.errors import error_content, error_message, is_messages_path
from services.gateway.http.other_paths import path_error
from services.gateway.spans import end_request, http_span

log = structlog.get_logger()

_POLLED = frozenset({"/health", "/ready", "/metrics", "/page/state"})
"""Paths of periodic requests, which are logged at debug level."""


class RequestTimeout(ServiceError):
    """The request did not arrive in time. Its connection is closed."""

    status, code = 408, "request_timeout"


class RequestMiddleware:
    """ASGI middleware that assigns request ids, and logs and counts each request.

    Args:
        requests: counter of requests by route and status.
        open_call: context in which each POST request is answered, see `Gateway.open_call`.
    """

    def __init__(
        self,
        app: ASGIApp,
        requests: Counter,
        open_call: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._app = app
        self._requests = requests
        self._open_call = open_call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = valid_request_id(headers.get("x-request-id"))
        span = http_span(scope, headers, request_id)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["span"] = span
        added = [(b"x-request-id", request_id.encode())]
        if is_messages_path(scope["path"]):  # Anthropic's clients read another header
            added.append((b"request-id", request_id.encode()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        call = self._open_call() if scope["method"] == "POST" else nullcontext()
        with call, structlog.contextvars.bound_contextvars(request_id=request_id, **span.ids):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                log.exception("unexpected error in a request")
            finally:  # also if the server cancels the request because it stops
                self._record(scope, state, span)

    def _record(self, scope: Scope, state: dict[str, Any], span: Span) -> None:
        # If a stream fails after status 200 was sent, the error's status is recorded instead.
        error: ServiceError | None = state.get("error")
        status = error.status if error is not None else state.get("status", 500)
        route = getattr(scope.get("route"), "path", "unknown")
        self._requests.labels(route, str(status)).inc()
        details = {} if error is None else {"error": error.message[:300]}
        level = log.warning if status >= HTTPStatus.INTERNAL_SERVER_ERROR else log.info
        if route in _POLLED:
            level = log.debug
        level("answered", method=scope["method"], endpoint=route, status=status, **details)
        span.set({"http.response.status_code": state.get("status", status)})
        if "route" in scope:
            span.rename(f"{scope['method']} {route}")
            span.set({"http.route": route})
        end_request(span, status, error)


async def handle_error(request: Request, error: Exception) -> Response:
    """Exception handler. A `ServiceError` keeps its status; any other exception becomes a 500."""
    expected = error if isinstance(error, ServiceError) else InternalFault("internal error")
    request.state.error = detached(expected)
    return error_response(expected, request.scope)


def error_response(error: ServiceError, scope: Scope | None = None) -> Response:
    """Return an error in the format of the interface.

    Args:
        scope: scope of the request; None for OpenAI's format.
    """
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"
    return Response(
        _error_body(error.body(), error_message(error), error.status, scope),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler that converts the framework's 404 and 405 to the format of errors."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == HTTPStatus.NOT_FOUND:
        return await handle_error(request, path_error(request.url.path))
    message = str(error.detail)
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Response(
        _error_body({"error": body}, message, error.status_code, request.scope),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


def _error_body(body: dict[str, Any], message: str, status: int, scope: Scope | None) -> bytes:
    """Return an error in the format of the path of a request.

    Args:
        body: the error in OpenAI's format.
        message: its message in Anthropic's format.
    """
    if scope is not None and is_messages_path(scope["path"]):
        return orjson.dumps(error_content(message, status, scope["state"]["request_id"]))
    return orjson.dumps(body)


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncGenerator[None]:
    """Cancel the body of the ``with`` block if the client disconnects, and raise `ClientGone`."""

    async def watch(scope: asyncio.Timeout) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.reschedule(0)  # now

    try:
        async with asyncio.timeout(None) as scope:
            watching = asyncio.create_task(watch(scope))
            yield
    except TimeoutError:
        if scope.expired():
            raise ClientGone("the client disconnected") from None
        raise
    finally:
        watching.cancel()
