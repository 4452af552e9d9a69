"""A client's connection: uvicorn's, with the bounds that it leaves open.

What came and what is waited for is bounded in every state: a request's head in bytes and in time,
what surrounds a body in bytes, a body in time (`edge` bounds its size), requests sent ahead in
number, a client that does not read in time. What never becomes a request is answered in OpenAI's
shape as well, and counted.

Who is answered before all was sent has time to read the answer: a socket closed while more comes
answers with a reset, and that takes the answer from clients that still write.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, cast

import httptools
import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from services.common.errors import InvalidRequest, Overloaded, ServiceError, SettingsError
from services.gateway.gateway import Gateway, request_id_from
from services.gateway.http.middleware import RequestTimeout, error_response

log = structlog.get_logger()

_BACKLOG = 2048
_LAST_ANSWERS_S = 2  # to write what is left after the drain
_LINGER_S = 5.0  # without a byte of what was answered before all of it had come
_LINGER_MOST_S = 30.0  # with bytes
_MAX_TURNED_AWAY = 256  # connections past the bound that linger
_MAX_AHEAD = 32  # requests sent while another is being answered


class HeadTooLarge(ServiceError):
    """A request line with its headers, a trailer or a chunk's framing past its bound."""

    status: ClassVar[int] = 431
    kind, code = "invalid_request_error", "headers_too_large"


def listen(host: str, port: int, *, write_timeout_s: float) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Args:
        write_timeout_s: a connection ends when its client takes in nothing for so long, also one
            that is closed on our side and only waits for the rest to be read.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_timeout_s * 1000)
        )
    return listener


def http_config(app: ASGIApp, gateway: Gateway) -> uvicorn.Config:
    """How uvicorn serves a gateway."""
    connection = partial(Connection, gateway=gateway, turned_away=set())
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", connection),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=gateway.settings.keep_alive_s,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )


class _Closing:
    """The transport as an answer knows it: to close it leaves time for the rest of the request."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


class Connection(HttpToolsProtocol):
    """One client's connection, from accept to close."""

    def __init__(
        self, *args: Any, gateway: Gateway, turned_away: set["Connection"], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._gateway = gateway
        self._settings = gateway.settings
        self._turned_away = turned_away  # of all: one too many when they came, and reading why
        self._fault: ServiceError | None = None  # why a callback stopped the parser
        self._unframed = 0  # bytes since the last one of a body, or the end of a request
        self._in_head = False
        self._in_body = False
        self._answered: RequestResponseCycle | None = None  # uvicorn knows the newest alone
        self._clock: asyncio.TimerHandle | None = None
        self._hung_up = False
        self._lingers_until: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_clock(self._settings.header_timeout_s)
        if len(self.connections) - len(self._turned_away) > self._settings.max_connections:
            self._turned_away.add(self)
            self._refuse(Overloaded("too many connections", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._turned_away.discard(self)
        self._drop_requests()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it after a reset, for `keep_alive_s`
        for cycle in (self.cycle, self._answered):
            if cycle is not None:
                cycle.transport = self.transport  # else all this waits for the garbage collector

    def shutdown(self) -> None:
        if self._hung_up:
            self.transport.close()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._lingers_until is not None:
            self._linger()
        if self._hung_up or self.transport.is_closing():
            return
        if self._clock is None and not self._in_body:
            self._start_clock(self._settings.header_timeout_s)
        self._unframed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._fault or InvalidRequest("this is not valid HTTP/1.1"))
        else:
            if self._unframed > self._settings.max_header_bytes:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is no header: it may not bring a key, nor an id
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if sum(len(n) + len(v) for n, v in self.headers) + len(self.url) > (
            self._settings.max_header_bytes
        ):
            self._stop_parser(self._too_large())
        if len(self.pipeline) >= _MAX_AHEAD:
            self._stop_parser(InvalidRequest(f"more than {_MAX_AHEAD} requests sent ahead"))
        self._in_head = False
        if self._offers_upgrade():
            return
        self._stop_clock()
        super().on_headers_complete()
        self.cycle.transport = cast("asyncio.Transport", _Closing(self.transport, self._close))
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._unframed = 0
        self._in_body = False
        self._lingers_until = None
        self._stop_clock()
        super().on_message_complete()
        if self.cycle.response_complete:  # nothing else waits for the next request
            self._start_clock(self._settings.header_timeout_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._hung_up:
            self._unset_keepalive_if_required()
        elif self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._linger()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _busy(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _parse(self, data: bytes) -> None:
        """Feeds the parser; a request that offers another protocol is taken as if it did not.

        Clients offer HTTP/2 so, Java's by default. The parser would leave such a request's body
        to the other protocol: it is given the head again, without the offer.
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
            self._stop_parser(InvalidRequest("this is no proxy"))
        return True

    def _stop_parser(self, fault: ServiceError) -> None:
        """Raises out of a callback; the parser's own error then reaches `data_received`."""
        self._fault = fault
        raise fault

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"the request's headers are larger than {self._settings.max_header_bytes} bytes"
        )

    def _refuse(self, error: ServiceError) -> None:
        """Hangs up, with an answer unless it would be read as a part of another request's."""
        if self._hung_up or self.transport.is_closing():
            return
        if self._in_body and self.cycle.response_complete:  # it has its answer
            self._hang_up()
            return
        mine = self._in_body and self._answered is self.cycle and not self.cycle.response_started
        answered = mine or not self._busy
        if answered:
            self.transport.write(self._answer(error))
        self._gateway.metrics.requests.labels("unknown", str(error.status)).inc()
        log.info("refused", status=error.status, error=error.message)
        if answered and len(self._turned_away) <= _MAX_TURNED_AWAY:
            self._hang_up()
        else:
            self.transport.close()

    def _close(self) -> None:
        """An answer is the last of its connection."""
        if self._in_body and not self.transport.is_closing():
            self._hang_up()
        else:
            self.transport.close()

    def _hang_up(self) -> None:
        """Says that nothing follows, and leaves what still comes unread until it ends."""
        self._hung_up = True
        self._drop_requests()
        with suppress(OSError):  # the client was faster
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger()

    def _linger(self) -> None:
        now = self.loop.time()
        if self._lingers_until is None:
            self._lingers_until = now + _LINGER_MOST_S
        if now < self._lingers_until:
            self._start_clock(min(_LINGER_S, self._lingers_until - now))
        else:  # a clock started anew with all that comes would never end
            self.transport.close()

    def _drop_requests(self) -> None:
        self.pipeline.clear()
        if self._answered is not None and self._busy:
            self._answered.disconnected = True
            self._answered.waiting_for_100_continue = False
            self._answered.message_event.set()

    def _answer(self, error: ServiceError) -> bytes:
        response = error_response(error)
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"x-request-id", request_id_from(None).encode()),
        ]
        if (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        lines = (b"%s: %s\r\n" % header for header in headers)
        return b"".join((STATUS_LINE[error.status], *lines, b"\r\n", bytes(response.body)))

    def _start_clock(self, seconds: float) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(seconds, self._time_is_up)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _time_is_up(self) -> None:
        self._clock = None
        if self._hung_up:
            self.transport.close()
        elif self._busy:
            # What comes behind a request that is being answered may be held up by us.
            self._start_clock(self._settings.header_timeout_s)
        elif self._in_head:
            limit_s = self._settings.header_timeout_s
            self._refuse(RequestTimeout(f"the headers did not arrive within {limit_s} s"))
        else:
            self.transport.close()
