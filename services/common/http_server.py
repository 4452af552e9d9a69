"""Listening sockets, and uvicorn without its signal handlers."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from services.common.errors import SettingsError

_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """HTTP server without signal handlers. To stop it, set ``should_exit``."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_accepting(self) -> None:
        """Close the listening sockets. Requests on open connections are still served."""
        for server in self.servers:
            server.close()


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Return a listening socket; port 0 selects a free port.

    Args:
        reuse_port: whether other processes of the same user may listen on the port as well
            (SO_REUSEPORT). The kernel then distributes the connections among them.

    Raises:
        SettingsError: if the address is invalid or the port is in use.
    """
    ipv6 = ":" in host
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ipv6 else socket.AF_INET,
            backlog=_BACKLOG,
            reuse_port=reuse_port,
            dualstack_ipv6=ipv6 and socket.has_dualstack_ipv6(),
        )
    except (OSError, ValueError) as error:  # ValueError: SO_REUSEPORT is not supported
        raise SettingsError(f"cannot listen on {host}:{port}: {error}") from error
