"""Limit on concurrent use, such as connections, in total and for each client address."""

from collections import Counter


class ClientLimit:
    """Counts concurrent uses, for example connections, in total and for each client.

    Args:
        total: maximum of all clients together.
        per_client: maximum of one client.
    """

    def __init__(self, total: int, per_client: int) -> None:
        self._free = total
        self._per_client = per_client
        self._used: Counter[str] = Counter()

    def take(self, client: str | None) -> bool:
        """Count one more; return False, without counting it, if a limit is reached.

        Args:
            client: address of the client. None counts towards the total only.
        """
        if not self._free or (client is not None and self._used[client] >= self._per_client):
            return False
        self._free -= 1
        if client is not None:
            self._used[client] += 1
        return True

    def release(self, client: str | None) -> None:
        """Undo a successful `take`."""
        self._free += 1
        if client is not None:
            self._used[client] -= 1
            if not self._used[client]:
                del self._used[client]
