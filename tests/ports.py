"""TCP ports on which nothing listens."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Return distinct ports of 127.0.0.1 that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    return free_ports(1)[0]
