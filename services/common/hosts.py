"""Check of the ``Host`` header, against DNS rebinding.

A web page can let its own domain name resolve to an address of this machine. The browser then
regards a service here as the page's own server, and lets the page call it and read the answers.
Such requests have the page's domain in ``Host``.
"""

from collections.abc import Iterable, Sequence

from services.common.addresses import parse_ip, without_port

# Names that public DNS does not resolve: RFC 6761, and ICANN's name for private use, which
# containers use for their host (host.docker.internal).
_LOCAL = ("localhost", "*.localhost", "*.internal")


class HostCheck:
    """Accepts IP addresses, names that are local to a machine, and the names in ``allowed``.

    Args:
        allowed: names to accept; ``*.example.com`` allows all names below a domain.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        names = [name.lower().rstrip(".") for name in (*_LOCAL, *allowed)]
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))

    def refusal(self, hosts: Sequence[str]) -> str | None:
        """Return why the values of ``Host`` are not accepted, or None.

        Clients that send no ``Host`` are not browsers, and are accepted.
        """
        for host in hosts:
            name = without_port(host).lower().rstrip(".")
            if not self._accepts(name):
                return (
                    f"the host name {name[:128]!r} is not allowed: call an IP address or "
                    "localhost, or add the name with --allowed-hosts"
                )
        return None

    def _accepts(self, name: str) -> bool:
        known = not name or name in self._names or name.endswith(self._suffixes)
        return known or parse_ip(name) is not None
