"""TCP ports on which nothing listens."""

import random
import socket
from contextlib import ExitStack, suppress

# Below the ports that Linux gives to outgoing connections, which could take one before its service
# listens on it.
_PORTS = range(16_000, 32_000)
_used: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Return consecutive ports of 127.0.0.1 that are free now. No port is returned twice."""
    generator = random.SystemRandom()  # processes of a test run choose different ports
    while True:
        first = generator.choice(_PORTS)
        ports = range(first, first + count)
        if not _used.isdisjoint(ports):
            continue
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            _used.update(ports)
            return list(ports)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    return free_ports(1)[0]
