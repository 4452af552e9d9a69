"""Metrics endpoint for processes that have no other HTTP server."""

import base64
import binascii
import hmac
import socket
import sys
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from services.common.errors import SettingsError
from services.common.tls import MutualTls

log = structlog.get_logger()

_TIMEOUT_S = 10.0  # of a TLS handshake, and of each read and write

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def start_metrics_server(
    host: str,
    port: int,
    registry: CollectorRegistry,
    *,
    token: str | None = None,
    tls: MutualTls | None = None,
) -> WSGIServer:
    """Serve ``/metrics`` from a daemon thread.

    Args:
        host: address to listen on.
        port: TCP port; 0 selects a free port. ``server_port`` of the result is the actual port.
        registry: metrics to expose.
        token: cluster token, as a bearer token or as the password of basic authentication; None
            for a server that requires none.
        tls: certificates for mutual TLS, or None for plain HTTP.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    try:
        server = _Server(host, port, tls)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} for metrics: {error}") from error
    app: App = make_wsgi_app(registry)
    server.set_app(_guarded(app, token) if token else app)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


class _SilentHandler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """WSGI server with one thread per connection, in which the TLS handshake takes place as well.

    A client that does not complete its handshake therefore delays no other.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, tls: MutualTls | None) -> None:
        self._tls = tls
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _SilentHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_TIMEOUT_S)
        with self._tls.server_context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, _request: object, client_address: Any) -> None:
        log.info("metrics connection failed", client=client_address[0], error=str(sys.exception()))


def _guarded(app: App, token: str) -> App:
    """Return an app that answers 401 without the cluster token."""

    def guard(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if may_read_metrics(environ.get("HTTP_AUTHORIZATION", ""), token):
            return app(environ, start_response)
        challenge = [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
        start_response("401 Unauthorized", challenge)
        return [b"the cluster token is missing or wrong\n"]

    return guard


def may_read_metrics(authorization: str, token: str) -> bool:
    """Return whether an Authorization header has the cluster token.

    Scrapers send it as a bearer token, or as the password of basic authentication.
    """
    scheme, _, value = authorization.partition(" ")
    given = value.encode()
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given, token.encode())
