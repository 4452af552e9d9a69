"""HTTP servers in threads of their own, for metrics and probes."""

import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore, Thread, Timer
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from services.common.cluster_token import TokenCheck
from services.common.errors import SettingsError
from services.common.hosts import HostCheck
from services.common.liveness import LivenessReports
from services.common.probes import PATHS, Probes
from services.common.settings import ServiceSettings
from services.common.tls import MutualTls

log = structlog.get_logger()

_TIMEOUT_S = 10.0
"""Time limit of each read and write, in seconds."""
_DEADLINE_S = 30.0
"""Time limit of a connection in seconds; a connection serves one request."""
_MAX_CONNECTIONS = 128
"""Maximum number of open connections of a server. It closes new ones above this number."""

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def start_metrics_server(
    host: str,
    port: int,
    registry: CollectorRegistry,
    *,
    token_check: TokenCheck | None = None,
    tls: MutualTls | None = None,
    hosts: HostCheck | None = None,
    probes: Probes | None = None,
) -> WSGIServer:
    """Serve ``/metrics`` from a daemon thread.

    Args:
        host: address to listen on.
        port: TCP port; 0 selects a free port. ``server_port`` of the result is the actual port.
        registry: metrics to expose.
        token_check: check of the cluster token, or None for a server that requires none.
        tls: certificates for mutual TLS, or None for plain HTTP.
        hosts: check of ``Host`` for a server that requires no token, or None.
        probes: ``/health`` and ``/ready``, which need no token; None for a server without them.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    metrics: App = make_wsgi_app(registry)

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if probes and environ["PATH_INFO"] in PATHS:
            return probes.app(environ, start_response)
        if hosts and (refusal := hosts.refusal([environ.get("HTTP_HOST", "")])):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [refusal.encode() + b"\n"]
        if token_check and not token_check.accepts_scraper(environ.get("HTTP_AUTHORIZATION", "")):
            challenge = [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
            start_response("401 Unauthorized", challenge)
            return [b"the cluster token is missing or wrong\n"]
        return metrics(environ, start_response)

    return _start(host, port, serve, tls, "metrics")


@contextmanager
def serving_start(settings: ServiceSettings, stage: Callable[[], str]) -> Iterator[None]:
    """Answer ``/health`` and ``/ready`` with what a service does that has not started yet.

    Both fail. Only a fixed ``health_port`` is served, because nobody knows a free one yet. Must be
    used on the event loop.

    Args:
        stage: returns what the service does; called on the event loop.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    if not settings.health_port:
        yield
        return

    async def starting() -> str | None:
        return stage()

    probes = Probes(starting, starting)
    server = _start(settings.host, settings.health_port, probes.app, None, "probes")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class OperationServers:
    """Servers of a process for its metrics and probes, and its reports to a supervisor.

    Attributes:
        servers: the servers, by the names of the settings of their ports. ``metrics_port`` serves
            ``/metrics``, ``/health`` and ``/ready``. ``health_port`` serves only the last two, over
            plain HTTP: a kubelet has no client certificate for a port with mutual TLS.
        reports: liveness reports; None without a supervisor.
    """

    servers: dict[str, WSGIServer] = field(default_factory=dict)
    reports: LivenessReports | None = None

    @classmethod
    def start(
        cls,
        settings: ServiceSettings,
        probes: Probes,
        registry: CollectorRegistry | None = None,
        metrics_port: int | None = None,
    ) -> Self:
        """Start the servers whose ports are not None; ``metrics_port`` needs a registry.

        Reports to a supervisor start as well, if this process has one.

        Raises:
            SettingsError: if the address is invalid or a port is in use.
        """
        host, health_port = settings.host, settings.health_port
        started = cls()
        try:
            if health_port is not None:
                started.servers["health_port"] = _start(
                    host, health_port, probes.app, None, "probes"
                )
            if registry is not None and metrics_port is not None:
                started.servers["metrics_port"] = start_metrics_server(
                    host,
                    metrics_port,
                    registry,
                    token_check=settings.token_check,
                    tls=settings.tls,
                    hosts=settings.host_check(authenticated=settings.authenticates_services),
                    probes=probes,
                )
        except SettingsError:
            started.stop()
            raise
        started.reports = LivenessReports.start(probes)
        return started

    @property
    def ports(self) -> dict[str, int]:
        """Ports by the names of their settings, for the log."""
        return {name: server.server_port for name, server in self.servers.items()}

    def stop(self) -> None:
        """Stop the servers and close their ports. Blocks for up to a second."""
        for server in self.servers.values():
            server.shutdown()
            server.server_close()
        if self.reports is not None:
            self.reports.stop()


def _start(host: str, port: int, app: App, tls: MutualTls | None, purpose: str) -> WSGIServer:
    try:
        server = _Server(host, port, tls)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} for {purpose}: {error}") from error
    server.set_app(app)
    Thread(target=server.serve_forever, daemon=True).start()
    return server


class _SilentHandler(WSGIRequestHandler):
    timeout = _TIMEOUT_S

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """WSGI server with one thread per connection, in which the TLS handshake takes place as well.

    A client that does not complete its handshake therefore delays no other. At most
    `_MAX_CONNECTIONS` are served at once.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, tls: MutualTls | None) -> None:
        self._tls = tls
        self._free = BoundedSemaphore(_MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _SilentHandler)

    def server_bind(self) -> None:
        """Bind without `HTTPServer`'s lookup of the host's name, which waits for a slow DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started; the caller closes the connection
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            with _deadline(request):
                super().finish_request(request, client_address)
            return
        request.settimeout(_TIMEOUT_S)
        context = self._tls.server_context
        secured = context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        with secured, _deadline(secured):
            secured.do_handshake()
            super().finish_request(secured, client_address)

    def handle_error(self, _request: object, client_address: Any) -> None:
        log.info("metrics connection failed", client=client_address[0], error=str(sys.exception()))


@contextmanager
def _deadline(connection: socket.socket) -> Iterator[None]:
    """Shut the connection down after `_DEADLINE_S`, also if its client sends byte by byte."""

    def shut_down() -> None:
        with suppress(OSError):  # the client has closed it
            connection.shutdown(socket.SHUT_RDWR)

    timer = Timer(_DEADLINE_S, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
