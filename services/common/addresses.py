"""Network addresses: IPv6 literals, loopback, and the local address towards another host."""

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


def is_loopback(host: str) -> bool:
    """Return whether a listener on ``host`` is reachable from this machine only.

    ``host`` is an IPv4 or IPv6 address or a name. Every address that a name resolves to must be a
    loopback address. An empty host (all interfaces) and an unknown name are not loopback.
    """
    if not host:
        return False
    bare = host.removeprefix("[").removesuffix("]")
    try:
        return _is_loopback_address(bare)
    except ValueError:
        pass  # the host is a name, not an address
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(_is_loopback_address(str(entry[4][0])) for entry in found)


def _is_loopback_address(address: str) -> bool:
    parsed = ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or parsed).is_loopback


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
