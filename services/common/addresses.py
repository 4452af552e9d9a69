"""Network addresses: IPv6 literals, loopback, and the local address towards another host."""

import socket
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

_MAX_IP_LENGTH = 64
"""Maximum length of the text of an IPv6 address with a zone. Text of clients is not kept if it is
longer."""


def bracketed(host: str) -> str:
    """Return the host as in ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def without_port(host: str) -> str:
    """Return the host of ``host:port``, ``[::1]:port`` or of an address that has no port."""
    bare = host.strip()
    if bare.startswith("["):
        return bare[1:].partition("]")[0]
    return bare.partition(":")[0] if bare.count(":") == 1 else bare


def parse_ip(text: str) -> IPv4Address | IPv6Address | None:
    """Return an IP address without its zone, or None for other text.

    The IPv4 address is returned for an IPv4-mapped one, such as ``::ffff:127.0.0.1``.
    """
    return _parse_ip(text) if len(text) <= _MAX_IP_LENGTH else None


@lru_cache(4096)
def _parse_ip(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text.partition("%")[0] if ":" in text else text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_unspecified(host: str) -> bool:
    """Return whether a listener on ``host`` uses all interfaces: ``0.0.0.0``, ``::`` or empty."""
    if not host:
        return True
    address = parse_ip(host.strip("[]"))
    return address is not None and address.is_unspecified


def is_loopback(host: str) -> bool:
    """Return whether a listener on ``host`` is reachable from this machine only.

    ``host`` is an IPv4 or IPv6 address or a name. Every address that a name resolves to must be a
    loopback address. An empty host (all interfaces) and an unknown name are not loopback.
    """
    if not host:
        return False
    bare = host.removeprefix("[").removesuffix("]")
    if address := parse_ip(bare):
        return address.is_loopback
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(is_loopback(str(entry[4][0])) for entry in found)


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
