"""The memory for request bodies, which all requests share."""

from collections import Counter
from collections.abc import Iterator
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
    """

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes that are held at present."""
        return self._held.total()

    @contextmanager
    def open(self, owner: str) -> Iterator["Buffer"]:
        """Return a buffer of one request, whose bytes are released at the end of the block.

        Args:
            owner: name of the tenant, or address of the client.
        """
        buffer = Buffer(self, owner)
        try:
            yield buffer
        finally:
            self._free += buffer.size
            self._held[owner] -= buffer.size
            if not self._held[owner]:
                del self._held[owner]

    def take(self, owner: str, size: int) -> None:
        """Count ``size`` more bytes for an owner. Raises `Overloaded` if a limit is exceeded."""
        if self._held[owner] + size > self._free:
            raise Overloaded("there is no memory for this request now: too many are being read")
        self._free -= size
        self._held[owner] += size


class Buffer:
    """The bytes of one request. ``size`` is their number."""

    def __init__(self, buffers: Buffers, owner: str) -> None:
        self._buffers = buffers
        self._owner = owner
        self.size = 0

    def grow(self, size: int) -> None:
        """Add bytes.

        Raises:
            Overloaded: if the limit of all requests or of the owner is exceeded.
        """
        self._buffers.take(self._owner, size)
        self.size += size
