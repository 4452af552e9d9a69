"""A client connection: uvicorn's HTTP protocol with the limits that uvicorn lacks.

Input and waiting time are limited in every state:

- request head: size, and time to receive it;
- request body: size of the chunk framing, and time to receive it (the middleware limits the size of
  the content);
- number of pipelined requests;
- time during which the client reads nothing.

Invalid HTTP is counted as a request and answered in OpenAI's error format.

If a response is complete before its request was received completely, the connection lingers: it
reads and discards input for a while. Otherwise, closing the socket with unread input would send
RST, and the client might lose the response.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import httptools
import structlog
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from services.common.client_limit import ClientLimit
from services.common.errors import InvalidRequest, Overloaded, ServiceError
from services.gateway.gateway import Gateway, valid_request_id
from services.gateway.http.middleware import RequestTimeout, error_response

log = structlog.get_logger()

_LINGER_S = 5.0
"""Time without input after which a lingering connection is closed, seconds."""
_MAX_LINGER_S = 30.0
"""Time after which a lingering connection is closed in any case, seconds."""
_MAX_REJECTED = 256
"""Maximum number of lingering connections that ``max_connections`` refused."""
_MAX_PIPELINED = 32
"""Maximum number of requests that are received while another one is answered."""


class HeadTooLarge(ServiceError):
    """The request line and headers, a trailer, or the framing of a chunk exceed their limit."""

    status, code = 431, "headers_too_large"


class _LingeringTransport:
    """Transport of one response. `close` lingers if the request is incomplete."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Connection(HttpToolsProtocol):
    """The connection of one client, from accept to close.

    Args:
        limit: counts the connections, except those that it refused.
        rejected: lingering connections that ``limit`` refused. All connections share this set.
    """

    def __init__(
        self,
        *args: Any,
        gateway: Gateway,
        limit: ClientLimit,
        rejected: set["Connection"],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._gateway = gateway
        self._settings = gateway.settings
        self._limit = limit
        # The client towards whose limit the connection counts. A proxy has many clients: None.
        self._counted_for: str | None = None
        self._rejected = rejected
        # The error that a callback of the parser raised.
        self._parse_error: ServiceError | None = None
        # Bytes received since the last data of a body, or since the last end of a request.
        self._framing_bytes = 0
        self._in_head = False
        self._in_body = False
        # The request being answered. uvicorn's `cycle` is the newest one, which may be queued.
        self._answering: RequestResponseCycle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._half_closed = False
        self._linger_deadline: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer(self._settings.header_timeout_s)
        peer = self.client and self.client[0]
        if not self._gateway.clients.is_proxy(peer):
            self._counted_for = self._gateway.clients.identify(peer).name
        if not self._limit.take(self._counted_for):
            self._rejected.add(self)
            self._refuse(Overloaded("too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self in self._rejected:
            self._rejected.remove(self)
        else:
            self._limit.release(self._counted_for)
        self._drop_requests()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn keeps this timer after a reset
        for cycle in (self.cycle, self._answering):
            if cycle is not None:
                cycle.transport = self.transport  # breaks a reference cycle with this connection

    def shutdown(self) -> None:
        if self._half_closed:
            self.transport.close()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._linger_deadline is not None:
            self._linger()
        if self._half_closed or self.transport.is_closing():
            return
        if self._timer is None and not self._in_body:
            self._start_timer(self._settings.header_timeout_s)
        self._framing_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._parse_error or InvalidRequest("the request is not valid HTTP/1.1"))
        else:
            if self._framing_bytes > self._settings.max_header_bytes:
                self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer must not set an API key or a request id
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if sum(len(n) + len(v) for n, v in self.headers) + len(self.url) > (
            self._settings.max_header_bytes
        ):
            self._stop_parser(self._head_too_large())
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._stop_parser(
                InvalidRequest(
                    f"there are more than {_MAX_PIPELINED} pipelined requests: wait for responses"
                )
            )
        self._in_head = False
        if self._offers_upgrade():
            return
        self._stop_timer()
        super().on_headers_complete()
        transport = _LingeringTransport(self.transport, self._close_after_response)
        self.cycle.transport = cast("asyncio.Transport", transport)
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._framing_bytes = 0
        self._in_body = False
        self._linger_deadline = None
        self._stop_timer()
        super().on_message_complete()
        if self.cycle.response_complete:  # otherwise the end of the response starts a timer
            self._start_timer(self._settings.header_timeout_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed:
            self._unset_keepalive_if_required()
        elif self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._linger()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _busy(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _parse(self, data: bytes) -> None:
        """Feed the parser, and ignore an offer to upgrade to another protocol.

        Some clients offer HTTP/2 in this way, for example Java's by default. After such a head, the
        parser would not parse the body. Therefore, a new parser gets the head without the offer.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            head = [b"%s %s HTTP/%s\r\n" % (method, self.url, version)]
            head += [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(b"".join(head) + b"\r\n")
            self._parse(data[upgrade.args[0] :])

    def _offers_upgrade(self) -> bool:
        if not self.parser.should_upgrade():
            return False
        if self.parser.get_method() == b"CONNECT":
            self._stop_parser(
                InvalidRequest("CONNECT is not supported: this server is not a proxy")
            )
        return True

    def _stop_parser(self, error: ServiceError) -> None:
        """Abort parsing from a parser callback. `data_received` then reports ``error``."""
        self._parse_error = error
        raise error

    def _head_too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"the request's headers are larger than {self._settings.max_header_bytes} bytes"
        )

    def _refuse(self, error: ServiceError) -> None:
        """Send an error, unless another response is in progress, and close the connection."""
        if self._half_closed or self.transport.is_closing():
            return
        if self._in_body and self.cycle.response_complete:  # the request was already answered
            self._half_close()
            return
        own = self._in_body and self._answering is self.cycle and not self.cycle.response_started
        answered = own or not self._busy
        if answered:
            self.transport.write(self._encode_error(error))
        self._gateway.metrics.requests.labels("unknown", str(error.status)).inc()
        log.info("refused", status=error.status, error=error.message)
        if answered and len(self._rejected) <= _MAX_REJECTED:
            self._half_close()
        else:
            self.transport.close()

    def _close_after_response(self) -> None:
        """Close after the last response of the connection; linger if its request is incomplete."""
        if self._in_body and not self.transport.is_closing():
            self._half_close()
        else:
            self.transport.close()

    def _half_close(self) -> None:
        """Send FIN and discard further input until the client closes or the linger ends."""
        self._half_closed = True
        self._drop_requests()
        with suppress(OSError):  # the client closed first
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger()

    def _linger(self) -> None:
        now = self.loop.time()
        if self._linger_deadline is None:
            self._linger_deadline = now + _MAX_LINGER_S
        if now < self._linger_deadline:
            self._start_timer(min(_LINGER_S, self._linger_deadline - now))
        else:  # input restarts the timer, so only the deadline ends the linger of an active client
            self.transport.close()

    def _drop_requests(self) -> None:
        self.pipeline.clear()
        if self._answering is not None and self._busy:
            self._answering.disconnected = True
            self._answering.waiting_for_100_continue = False
            self._answering.message_event.set()

    def _encode_error(self, error: ServiceError) -> bytes:
        response = error_response(error)
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"x-request-id", valid_request_id(None).encode()),
        ]
        if (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        lines = (b"%s: %s\r\n" % header for header in headers)
        return b"".join((STATUS_LINE[error.status], *lines, b"\r\n", bytes(response.body)))

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._half_closed:
            self.transport.close()
        elif self._busy:
            # The next request may be incomplete because reading pauses during this response.
            self._start_timer(self._settings.header_timeout_s)
        elif self._in_head:
            limit_s = self._settings.header_timeout_s
            self._refuse(RequestTimeout(f"the headers did not arrive within {limit_s} s"))
        else:
            self.transport.close()
