"""Calls of workers and gateways: POST requests whose bodies and answers are JSON messages.

Quart does not serve them. For each request, it starts two tasks, creates contexts and sends
signals, which costs more than the rest of a call together (see BENCHMARKS.md).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import structlog
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send
from werkzeug.exceptions import (
    MethodNotAllowed,
    RequestEntityTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)

from services.common.router_errors import ErrorCode
from services.router.access import Access
from services.router.answers import CONTENT_TYPE, Answer, answer, error_answer
from services.router.errors import Refusal

log = structlog.get_logger()

BODY_TIMEOUT_S = 60.0
"""Maximum time to receive the body of a call, seconds."""
SEND_TIMEOUT_S = 60.0
"""Maximum time to send the answer of a call, seconds. The connection is then closed."""

M = TypeVar("M", bound=BaseModel)
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Disconnected(Exception):
    """The caller has closed the connection, so that no answer can be sent."""


class Call:
    """One call.

    Attributes:
        path: path of the URL.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive

    def headers(self, name: str) -> list[str]:
        """Return all values of a header, given its name in lower case."""
        wanted = name.encode()
        return [value.decode("latin-1") for key, value in self._headers if key == wanted]

    async def body(self, max_bytes: int) -> bytes:
        """Receive the body.

        Raises:
            RequestEntityTooLarge: if it is longer than ``max_bytes``.
            RequestTimeout: if it is not complete after `BODY_TIMEOUT_S`.
            Disconnected: if the caller disconnects before it is complete.
        """
        declared = next(iter(self.headers("content-length")), "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise RequestEntityTooLarge
        body = bytearray()
        complete = False
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not complete:
                    event = await self._receive()
                    if event["type"] == "http.disconnect":
                        raise Disconnected
                    body += event.get("body", b"")
                    complete = not event.get("more_body", False)
                    if len(body) > max_bytes:
                        raise RequestEntityTooLarge
        except TimeoutError:
            raise RequestTimeout from None
        return bytes(body)

    async def until(self, event: asyncio.Event) -> None:
        """Wait for an event. The body must have been received.

        Raises:
            Disconnected: if the caller disconnects, even if the event occurs as well.
        """
        if event.is_set():
            return
        occurred = asyncio.create_task(event.wait())
        gone = asyncio.create_task(self._until_gone())
        try:
            await asyncio.wait({occurred, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise Disconnected
        finally:
            occurred.cancel()
            gone.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Waiting(Protocol[A_co]):
    """A placement request that a dispatcher answers."""

    @property
    def answered(self) -> asyncio.Event: ...
    @property
    def answer(self) -> "A_co | Refusal | None": ...


async def placed(
    call: Call,
    pending: Waiting[A],
    *,
    cancel: Callable[[], None],
    record: Callable[[str], None],
) -> A:
    """Wait for the answer to a placement request, and return the placement.

    Args:
        cancel: withdraws the request; called if the caller disconnects.
        record: called once with the outcome: ``placed``, ``abandoned`` or the code of the refusal.

    Raises:
        Refusal: if the request is not placed.
        Disconnected: if the caller disconnects.
    """
    outcome = "abandoned"
    try:
        await call.until(pending.answered)
        found = pending.answer
        if found is None:
            raise RuntimeError("a placement request ended without an answer")
        if isinstance(found, Refusal):
            raise found
        outcome = "placed"
        return found
    except (Disconnected, asyncio.CancelledError):
        cancel()
        raise
    except Refusal as error:
        outcome = error.code.value
        raise
    finally:
        record(outcome)


Handler = Callable[[M, Call], Awaitable[BaseModel | None]]
"""Handles the calls of one path and returns the answer; None stands for an empty object."""


class JsonCalls:
    """ASGI app that answers the calls of workers and gateways.

    Args:
        access: check of every call.
        count: called with the path and the status of every answer.
        max_body_bytes: maximum length of a body.
        retry_after_s: ``Retry-After`` of errors that have none of their own.
    """

    def __init__(
        self,
        access: Access,
        count: Callable[[str, int], None],
        *,
        max_body_bytes: int,
        retry_after_s: int,
    ) -> None:
        self._access = access
        self._count = count
        self._max_body_bytes = max_body_bytes
        self._retry_after_s = retry_after_s
        self._routes: dict[str, tuple[type[BaseModel], Handler[Any]]] = {}

    def post(self, path: str, body: type[M]) -> Callable[[Handler[M]], Handler[M]]:
        """Return a decorator for the handler of the calls of a path."""

        def add(handle: Handler[M]) -> Handler[M]:
            self._routes[path] = body, handle
            return handle

        return add

    def serves(self, scope: Scope) -> bool:
        """Return whether a request has the path of a call."""
        return scope["type"] == "http" and scope["path"] in self._routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose path is that of a call."""
        call = Call(scope, receive)
        try:
            response = answer(await self._handle(call))
        except Disconnected:
            return
        except Exception as error:  # noqa: BLE001 - `error_answer` logs it
            response = error_answer(error, call.path, self._retry_after_s)
        self._count(call.path, response.status)
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await _send(response, send)
        except TimeoutError:
            log.warning("caller does not read its answers", path=call.path)
            raise

    async def _handle(self, call: Call) -> BaseModel | None:
        body_class, handle = self._routes[call.path]
        self._access.check(call.path, call.headers)
        if call.method != "POST":
            raise MethodNotAllowed
        # Any web page can make a browser send a body with another type. For JSON, the browser first
        # sends a CORS preflight request, which fails.
        declared = next(iter(call.headers("content-type")), "")
        if declared.partition(";")[0].strip().lower() != CONTENT_TYPE:
            raise UnsupportedMediaType(f"the content type must be {CONTENT_TYPE}")
        body = await call.body(self._max_body_bytes)
        try:
            message = body_class.model_validate_json(body)
        except ValidationError as error:
            raise _invalid(error) from None
        return await handle(message, call)


def _invalid(error: ValidationError) -> Refusal:
    """Return the error of an invalid body. Its message names the first invalid field."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, fault["loc"])) or "body"
    return Refusal(ErrorCode.INVALID, f"{where}: {fault['msg']}")


async def _send(response: Answer, send: Send) -> None:
    body = response.body.encode()
    headers = [
        (b"content-type", CONTENT_TYPE.encode()),
        (b"content-length", b"%d" % len(body)),
    ]
    if response.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % response.retry_after_s))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
