"""uvicorn's configuration for the router, and limits of its connections."""

import asyncio
from typing import cast

import uvicorn
from quart import Quart
from uvicorn._types import ASGIApplication
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.tls import MutualTls

KEEP_ALIVE_S = 75
"""Time in seconds after which an idle connection is closed. It is longer than that of clients, so
that usually the client closes it."""
GRACE_S = 3
"""Time to send the last responses after queued calls were refused, seconds."""
MAX_HEAD_BYTES = 16 * 1024


class Connection(HttpToolsProtocol):
    """Connection with two limits that uvicorn lacks.

    - A connection on which no request begins is closed after the keep-alive time. uvicorn starts
      this time only after a response.
    - A request head or trailer that exceeds `MAX_HEAD_BYTES` before it is complete gets a 400.
    """

    _head_bytes = 0
    """Bytes received since a head, a part of a body or a request was complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request head is too long.")

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()


def http_config(app: Quart, tls: MutualTls | None = None) -> uvicorn.Config:
    """Return uvicorn's configuration, with mutual TLS if there are certificates."""
    return uvicorn.Config(
        cast("ASGIApplication", app),
        http=cast("type[asyncio.Protocol]", Connection),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        ssl_context_factory=(lambda _config, _default: tls.server_context) if tls else None,
    )
