"""Leases: bounded claims on encoded KV. Every lease ends, by release or by expiry."""

from services.transfer.errors import LeasesExhausted


class LeaseTable:
    """The leases of a sender. Pure bookkeeping; not thread-safe.

    Times are seconds of a monotonic clock and are passed in. A lease past its end cannot be
    renewed, even if `expired` has not reported it yet.

    Args:
        lease_s: seconds from the grant or the last renewal to the end.
        max_leases: maximum number of leases at a time.
    """

    def __init__(self, lease_s: float, max_leases: int) -> None:
        if lease_s <= 0 or max_leases < 1:
            raise ValueError(f"max_leases ({max_leases}) and lease_s ({lease_s}) must be positive")
        self._lease_s = lease_s
        self._max_leases = max_leases
        self._ends: dict[str, float] = {}

    @property
    def active(self) -> int:
        """Number of leases neither released nor reported as expired."""
        return len(self._ends)

    def grant(self, key: str, now: float) -> None:
        """Start a lease, or restart it.

        Raises:
            LeasesExhausted: ``max_leases`` other leases are held.
        """
        if key not in self._ends and len(self._ends) >= self._max_leases:
            raise LeasesExhausted(f"all {self._max_leases} leases are in use")
        self._ends[key] = now + self._lease_s

    def renew(self, key: str, now: float) -> bool:
        """Extend a lease; return False if there is none or it has ended."""
        end = self._ends.get(key)
        if end is None or now >= end:
            return False
        self._ends[key] = now + self._lease_s
        return True

    def release(self, key: str) -> bool:
        """End a lease; return False if there is none. Idempotent."""
        return self._ends.pop(key, None) is not None

    def expired(self, now: float) -> list[str]:
        """Remove and return the leases that have ended, in the order of their ends."""
        keys = sorted(
            (key for key, end in self._ends.items() if now >= end), key=self._ends.__getitem__
        )
        for key in keys:
            del self._ends[key]
        return keys
