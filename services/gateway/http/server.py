"""The listening socket of the HTTP server, and uvicorn's configuration."""

import asyncio
import socket
from functools import partial
from importlib.metadata import version
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.client_limit import ClientLimit
from services.common.errors import SettingsError
from services.common.http_server import listen
from services.gateway.gateway import Gateway
from services.gateway.http.connection import Connection

_SHUTDOWN_GRACE_S = 2
"""Time to write the remaining responses after the drain, seconds."""

# Methods of uvicorn's protocol that `Connection` overrides; some are private.
_HOOKS = (
    *("connection_made", "connection_lost", "data_received", "shutdown", "_start_asgi_task"),
    *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    *("on_response_complete", "_unset_keepalive_if_required"),
)


def listen_for_clients(
    host: str, port: int, *, write_timeout_s: float, reuse_port: bool = False
) -> socket.socket:
    """Return a listening socket; port 0 selects a free port.

    Args:
        write_timeout_s: time in seconds after which a connection is closed if its client reads
            nothing.
        reuse_port: see `listen`.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    listener = listen(host, port, reuse_port=reuse_port)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
        listener.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_timeout_s * 1000)
        )
    return listener


def http_config(app: ASGIApp, gateway: Gateway) -> uvicorn.Config:
    """Return uvicorn's configuration for a gateway.

    Raises:
        SettingsError: if the installed version of uvicorn lacks a hook.
    """
    check_hooks(HttpToolsProtocol)
    settings = gateway.settings
    limit = ClientLimit(settings.max_connections, settings.max_client_connections)
    connection = partial(Connection, gateway=gateway, limit=limit, rejected=set())
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", connection),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )


def check_hooks(protocol: type) -> None:
    """Raise `SettingsError` unless ``protocol`` has every method that `Connection` overrides."""
    missing = [name for name in _HOOKS if not hasattr(protocol, name)]
    if missing:
        raise SettingsError(
            f"uvicorn {version('uvicorn')} is not supported: its HTTP protocol class has no "
            f"{', '.join(missing)}. Install the version that pyproject.toml requires"
        )
