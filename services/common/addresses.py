"""Network addresses: IPv6 literals, and this machine's address on the way to another one."""

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit


def bracketed(host: str) -> str:
    """Return the host as in ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def without_port(host: str) -> str:
    """Return the host of ``host:port``, ``[::1]:port`` or of an address that has no port."""
    bare = host.strip()
    if bare.startswith("["):
        return bare[1:].partition("]")[0]
    return bare.partition(":")[0] if bare.count(":") == 1 else bare


def is_unspecified(host: str) -> bool:
    """Return whether a listener on ``host`` uses all interfaces: ``0.0.0.0``, ``::`` or empty."""
    try:
        return not host or ip_address(host.strip("[]")).is_unspecified
    except ValueError:  # a name
        return False


def address_towards(url: str) -> str | None:
    """Return the local IP address from which connections to a URL's host are made.

    Nothing is sent. The result is None if the host is unknown or there is no route to it.
    """
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            return None
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as route:
                route.connect(address)
                return str(route.getsockname()[0])
        except OSError:
            continue
    return None
