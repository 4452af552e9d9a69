"""HTTP response of a generation, as JSON or as server-sent events."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import ServiceError, detached
from services.gateway.gateway import Gateway, enforce_deadline
from services.gateway.http.middleware import cancel_on_disconnect
from services.gateway.requests import GenerationRequest
from services.gateway.text import TextDelta

_SEND_ERROR_TIMEOUT_S = 1.0
"""Maximum time to send an error, in seconds. The client may not be reading."""
_MANY_TOKENS = 1000
"""Number of output tokens from which a body is formatted in a thread."""
_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventFormatter(Protocol):
    """Formats the output of one response as server-sent events."""

    def write(self, deltas: Sequence[TextDelta]) -> bytes:
        """Return the events of a batch of deltas; empty if there is nothing to send yet."""

    def finish(self) -> bytes:
        """Return the last events of a complete output."""

    def fail(self, error: ServiceError) -> bytes:
        """Return the last events of an output that ends with an error."""


class BodyFormatter(Protocol):
    """Collects the output of one response that is not streamed."""

    def add(self, deltas: Sequence[TextDelta]) -> None:
        """Append a batch of deltas."""

    def body(self) -> bytes:
        """Return the response body, JSON."""


class OutputFormat(Protocol):
    """Format of a response in one interface."""

    def events(self) -> EventFormatter:
        """Return the formatter of a response that is streamed."""

    def whole(self) -> BodyFormatter:
        """Return the formatter of a response that is not streamed."""


def json_response(content: object, status: int = 200) -> Response:
    """Return a response with a JSON body."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


class GenerationResponse(Response):
    """Generates the output of one or several requests. A disconnect of the client cancels them.

    Raises:
        ServiceError: if the generation fails before anything was sent. If a stream fails later,
            the error is sent as its last event.
    """

    def __init__(
        self,
        gateway: Gateway,
        requests: Sequence[GenerationRequest],
        output: OutputFormat,
        *,
        stream: bool,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._requests = requests
        self._output = output
        self._streams = stream
        self._started = self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._output.events() if self._streams else None
        work = self._send_events(events, send) if events else self._send_json(scope, receive, send)
        try:
            async with (
                enforce_deadline(self._requests[0].context.deadline),
                cancel_on_disconnect(receive),
            ):
                await work
        except ServiceError as error:
            if not self._started:
                raise
            if self._ended or events is None:  # the response was complete just before the deadline
                return
            scope["state"]["error"] = detached(error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_SEND_ERROR_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": events.fail(error)})

    async def _send_events(self, formatter: EventFormatter, send: Send) -> None:
        async with aclosing(self._gateway.generate(self._requests)) as output:
            async for deltas in output:
                if not self._started:
                    # Headers are sent with the first token: earlier failures get an error status.
                    self._started = True
                    start = {"status": 200, "headers": list(_EVENT_STREAM_HEADERS)}
                    await send({"type": "http.response.start", **start})
                if events := formatter.write(deltas):
                    body = {"body": events, "more_body": True}
                    await send({"type": "http.response.body", **body})
        self._ended = True
        await send({"type": "http.response.body", "body": formatter.finish()})

    async def _send_json(self, scope: Scope, receive: Receive, send: Send) -> None:
        builder, tokens = self._output.whole(), 0
        async with aclosing(self._gateway.generate(self._requests)) as output:
            async for deltas in output:
                builder.add(deltas)
                tokens += sum(len(delta.tokens) for delta in deltas)
        # Log probabilities of many tokens take seconds to format.
        is_large = tokens > _MANY_TOKENS
        body = await asyncio.to_thread(builder.body) if is_large else builder.body()
        response = Response(body, media_type="application/json")
        self._started = self._ended = True
        await response(scope, receive, send)
