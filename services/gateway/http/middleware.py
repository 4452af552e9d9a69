"""The rim of the HTTP server: request ids, errors, counts and logs of each request, bodies within
bounds, clients that leave."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any, TypeVar

import grpc
import orjson
import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import ClientGone, InternalFault, ServiceError, TooLarge
from services.gateway.gateway import request_id_from

log = structlog.get_logger()

_T = TypeVar("_T")

_PROBES = frozenset({"/health", "/ready", "/metrics"})  # asked for every few seconds


class RequestTimeout(ServiceError):
    """A request that did not arrive in time. Its connection is not used further."""

    status, kind, code = 408, "timeout_error", "request_timeout"
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED


class Edge:
    """Wraps the application: every request gets an id, one log line and one count.

    Args:
        count: called with the route and the status of each request.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_from(Headers(scope=scope).get("x-request-id"))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                log.exception("request broke")
            self._account(scope, state)

    def _account(self, scope: Scope, state: dict[str, Any]) -> None:
        # The error of a stream comes after its status was sent, and counts for more.
        error: ServiceError | None = state.get("error")
        status = error.status if error is not None else state.get("status", 500)
        route = getattr(scope.get("route"), "path", "unknown")
        self._count(route, status)
        told = {} if error is None else {"error": error.message[:300]}
        level = log.warning if status >= HTTPStatus.INTERNAL_SERVER_ERROR else log.info
        if route in _PROBES:
            level = log.debug
        level("answered", method=scope["method"], endpoint=route, status=status, **told)


async def refuse(request: Request, error: Exception) -> Response:
    """The answer to an error: an expected one as it is, any other as a fault of ours."""
    expected = error if isinstance(error, ServiceError) else InternalFault("internal error")
    request.state.error = expected
    return error_response(expected)


def error_response(error: ServiceError) -> Response:
    """An error in OpenAI's shape, with what a client needs to try again."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, RequestTimeout):
        headers["connection"] = "close"
    return Response(
        orjson.dumps(error.body()),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


async def refuse_route(_request: Request, error: Exception) -> Response:
    """No such path, or not with this method: the framework's own refusals, in OpenAI's shape."""
    if not isinstance(error, HTTPException):
        raise error
    body = {"message": str(error.detail), "type": "invalid_request_error"}
    return Response(
        orjson.dumps({"error": {**body, "param": None, "code": None}}),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )


async def read_body(request: Request, *, limit: int, timeout_s: float) -> bytes:
    """The body, read no further than ``limit`` bytes and waited for no longer than ``timeout_s``.

    Raises:
        TooLarge, RequestTimeout, ClientGone: it is too long, too slow, or will not come.
    """
    too_large = TooLarge(f"the body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client left before its request was complete")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {timeout_s} s") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        ClientGone: it left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client left")
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
