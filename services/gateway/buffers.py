"""The memory for request bodies, which all requests share."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.common.errors import Overloaded


class Buffers:
    """Bounds the bytes of request bodies in memory, in total and for each owner.

    An owner may hold at most as many bytes as are free (dynamic thresholds: Choudhury and Hahne,
    1998). One owner thus holds at most half of the limit, two owners a third each, and there is
    always space for another one. A request that exceeds this is refused instead of delayed:
    requests that hold parts of their bodies and wait for each other could not continue.

    Args:
        limit: maximum bytes of all bodies together.

    Attributes:
        held: bytes of each owner.
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self.held: Counter[str] = Counter()

    @contextmanager
    def open(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Return the buffer of one request, whose bytes are released at the end of the block.

        The buffer is a function that adds a number of bytes. It raises `Overloaded` if they exceed
        what the owner may hold.

        Args:
            owner: name of the tenant, or address of the client.
        """
        size = 0

        def grow(added: int) -> None:
            nonlocal size
            if self.held[owner] + added > self._free:
                raise Overloaded("there is no memory for this request now: too many are being read")
            size += added
            self.held[owner] += added
            self._free -= added

        try:
            yield grow
        finally:
            self._free += size
            self.held[owner] -= size
            if not self.held[owner]:
                del self.held[owner]
