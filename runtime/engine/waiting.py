"""The queue of sequence groups that wait for batch slots and pages."""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from runtime.core.sequence import SequenceGroup

by_arrival = attrgetter("arrival")
"""Sort key of sequences and groups: from oldest to youngest."""


class WaitingQueue(list[SequenceGroup]):
    """Groups without batch slots, by age.

    Args:
        limit: maximum number of groups. Preempted groups are never refused and may exceed it.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        # Groups submitted since the last call of `take_fresh`.
        self._fresh: list[SequenceGroup] = []

    def submit(self, group: SequenceGroup) -> None:
        """Add a new group, which is the youngest."""
        self.append(group)
        self._fresh.append(group)

    def requeue(self, group: SequenceGroup) -> None:
        """Add a preempted group."""
        insort(self, group, key=by_arrival)

    def overflow(self) -> Iterator[SequenceGroup]:
        """Yield groups submitted since `take_fresh`, newest first, while the limit is exceeded.

        The caller must remove each group before it takes the next one.
        """
        for group in reversed(self._fresh):
            if len(self) <= self._limit:
                break
            if group in self:
                yield group

    def take_fresh(self) -> list[SequenceGroup]:
        """Return the groups submitted since the last call that still wait."""
        if not self._fresh:
            return []
        waiting = set(self)
        fresh = [group for group in self._fresh if group in waiting]
        self._fresh.clear()
        return fresh
