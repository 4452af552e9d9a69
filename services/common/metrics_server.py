"""Metrics endpoint for processes that have no other HTTP server."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from services.common.errors import SettingsError


def start_metrics_server(host: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    """Serve ``/metrics`` from a daemon thread.

    Args:
        host: address to listen on.
        port: TCP port; 0 selects a free port. ``server_port`` of the result is the actual port.
        registry: metrics to expose.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} for metrics: {error}") from error
    return server
