"""Addresses of clients, also behind trusted proxies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_network

from services.common.addresses import parse_ip, without_port

FORWARDED_FOR = "x-forwarded-for"

_IPV6_PREFIX = 64
"""Bits of an IPv6 address that identify a client: a subscriber has a whole network of this size."""
_UNKNOWN = "unknown"
"""Name of peers without an IP address."""

_Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Client:
    """The client of a request or a connection.

    Attributes:
        name: its IPv4 address or its IPv6 network.
        forwarded: whether ``X-Forwarded-For`` of a trusted proxy named it. The connection is then
            the proxy's.
    """

    name: str
    forwarded: bool = False


class ClientAddresses:
    """Identifies clients by the peer of the connection and by ``X-Forwarded-For``.

    The header counts only if a trusted proxy sent it. Every proxy appends the address of its own
    peer, so the list is read from its end, until an address is not that of a trusted proxy.

    Args:
        trusted_proxies: addresses or networks (CIDR) of the proxies.

    Raises:
        ValueError: if one of them is not an address or a network.
    """

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        self._trusted = [ip_network(given, strict=False) for given in trusted_proxies]

    def is_proxy(self, peer: str | None) -> bool:
        """Return whether the peer of a connection is a trusted proxy."""
        address = parse_ip(peer or "")
        return address is not None and self._trusts(address)

    def identify(self, peer: str | None, forwarded: Iterable[str] = ()) -> Client:
        """Return the client of a request.

        Args:
            peer: address of the connection's peer.
            forwarded: values of all ``X-Forwarded-For`` headers, in order.
        """
        address = parse_ip(peer or "")
        if address is None:
            return Client(_UNKNOWN)
        hops = 0
        if self._trusts(address):
            for entry in reversed(",".join(forwarded).split(",")):
                if (named := parse_ip(without_port(entry))) is None:
                    break
                address, hops = named, hops + 1
                if not self._trusts(address):
                    break
        return Client(_name(address), hops > 0)

    def _trusts(self, address: _Address) -> bool:
        return any(address in network for network in self._trusted)


def split_grpc_peer(peer: str) -> str | None:
    """Return the IP address in the peer of a gRPC call, such as ``ipv6:%5B::1%5D:123``."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    return without_port(rest.replace("%5B", "[").replace("%5D", "]"))


def _name(address: _Address) -> str:
    if isinstance(address, IPv4Address):
        return str(address)
    return str(ip_network((address, _IPV6_PREFIX), strict=False))
