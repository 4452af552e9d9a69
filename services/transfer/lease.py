"""Leases: time-limited rights of a reader to encoded KV. A lease ends by release or by expiry.

A lease keeps the pages and slots of a sequence for its reader. The end of the reader's session
releases it. A reader may also hang while its connection is open. The sender cannot distinguish this
from a slow link, so it limits the time without progress. If a sender restarts, its slots hold the
KV of other sequences. The new process has a new *epoch*. Handshake and frames contain the epoch, so
KV of a former epoch is never used.
"""

from dataclasses import dataclass


@dataclass
class _Lease:
    """A lease.

    Attributes:
        since: time at which its timer was started; None while it does not run.
    """

    reader: str
    since: float | None = None


class LeaseTable:
    """The leases of a sender. Pure bookkeeping; not thread-safe.

    The timer of a lease runs only while its reader has encoded segments to acknowledge. The lease
    expires after ``lease_s`` without progress of the reader. Progress is an acknowledgement or a
    credit for any of the reader's sequences, because they share one link. A reader that waits for
    landing slots does not lose its lease; the end of its session releases it.

    Times are seconds of a monotonic clock and are passed in.

    Args:
        lease_s: seconds without progress after which a lease expires while its timer runs.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        # Time of the last progress of each reader.
        self._progress: dict[str, float] = {}

    @property
    def active(self) -> int:
        """Number of leases neither released nor reported as expired."""
        return len(self._leases)

    def grant(self, key: str, reader: str) -> None:
        """Grant a lease, whose timer does not run yet. Idempotent."""
        self._leases.setdefault(key, _Lease(reader))

    def run(self, key: str, now: float) -> None:
        """Start the timer of a lease. If it runs already or there is no lease, do nothing."""
        lease = self._leases.get(key)
        if lease is not None and lease.since is None:
            lease.since = now

    def pause(self, key: str) -> None:
        """Stop the timer of a lease, because its reader has nothing to acknowledge."""
        if lease := self._leases.get(key):
            lease.since = None

    def progressed(self, reader: str, now: float) -> None:
        """Restart the timers of a reader's leases; those that do not run stay stopped."""
        if any(lease.reader == reader for lease in self._leases.values()):
            self._progress[reader] = now

    def release(self, key: str) -> None:
        """End a lease. Idempotent."""
        lease = self._leases.pop(key, None)
        if lease and all(other.reader != lease.reader for other in self._leases.values()):
            self._progress.pop(lease.reader, None)

    def expired(self, now: float) -> list[str]:
        """Remove and return the leases that have expired, in the order of their expiry."""
        ends = {
            key: max(lease.since, self._progress.get(lease.reader, lease.since)) + self._lease_s
            for key, lease in self._leases.items()
            if lease.since is not None
        }
        keys = sorted((key for key, end in ends.items() if now >= end), key=ends.__getitem__)
        for key in keys:
            self.release(key)
        return keys
