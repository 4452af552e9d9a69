"""The HTTP server from which Prometheus scrapes a process that has no other HTTP interface."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from services.common.errors import SettingsError


def start_metrics_server(host: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    """Serve ``/metrics`` from a daemon thread.

    Args:
        host: address to listen on.
        port: TCP port; 0 takes a free one, which is the ``server_port`` of the result.
        registry: metrics to expose.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} for metrics: {error}") from error
    return server
