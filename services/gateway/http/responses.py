"""The HTTP response that generates while it is sent, whole or as server-sent events."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import ServiceError
from services.gateway.gateway import Gateway, within
from services.gateway.http.answers import AnswerShape, EventWriter, WholeAnswer, event
from services.gateway.http.middleware import while_connected
from services.gateway.requests import GenerationRequest

_LAST_WORD_S = 1.0  # to tell a client of an error that may not be reading
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GeneratedResponse(Response):
    """Answers one or several requests; stops generating when nobody reads.

    Raises:
        ServiceError: there is no answer, and nothing was sent. Later errors are the last event.
    """

    def __init__(
        self,
        gateway: Gateway,
        requests: Sequence[GenerationRequest],
        shape: AnswerShape,
        *,
        stream: bool,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._requests = requests
        self._shape = shape
        self._streams = stream
        self._prompt_tokens = sum(len(request.prompt) for request in requests)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._streams else self._whole(send)
        try:
            async with within(self._requests[0].deadline):
                await while_connected(receive, work)
        except ServiceError as error:
            if not self._started:
                raise
            scope["state"]["error"] = error
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await send({"type": "http.response.body", "body": event(error.body())})

    async def _stream(self, send: Send) -> None:
        writer = EventWriter(self._shape, self._prompt_tokens)
        async with aclosing(self._gateway.answer(self._requests)) as answer:
            async for pieces in answer:
                if not self._started:
                    # Not before the first token: until then a failure still has its own status.
                    self._started = True
                    start = {"status": 200, "headers": list(_EVENT_STREAM)}
                    await send({"type": "http.response.start", **start})
                if events := writer.write(pieces):
                    body = {"body": events, "more_body": True}
                    await send({"type": "http.response.body", **body})
        await send({"type": "http.response.body", "body": writer.finish()})

    async def _whole(self, send: Send) -> None:
        choices = sum(request.choices for request in self._requests)
        whole = WholeAnswer(self._shape, self._prompt_tokens, choices)
        async with aclosing(self._gateway.answer(self._requests)) as answer:
            async for pieces in answer:
                whole.add(pieces)
        body = whole.body()
        self._started = True
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
