"""Queue of place calls that wait for capacity, ordered by priority, then by arrival."""

import asyncio
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.common.placement import Placement, PlaceRequest
from services.router.capacity import Demand
from services.router.errors import RouterException


@dataclass(eq=False)
class PendingPlacement:
    """A place call, which is answered exactly once. Times are in seconds."""

    request: PlaceRequest
    demand: Demand
    arrived: float
    deadline: float
    answer: Placement | RouterException | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def resolve(self, answer: Placement | RouterException) -> None:
        """Set the answer and wake the caller."""
        self.answer = answer
        self.answered.set()


class PlacementQueue:
    """Queued place calls. The dispatcher ensures that there are at most ``max_waiting``."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._arrivals = 0
        self._order: list[tuple[int, int, PendingPlacement]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[PendingPlacement]:
        return iter([call for _, _, call in self._order])

    @property
    def overfull(self) -> bool:
        """Whether more than ``max_waiting`` calls are queued."""
        return len(self._order) > self._max_waiting

    def add(self, call: PendingPlacement) -> None:
        """Queue a call after those of equal or higher priority."""
        self._arrivals += 1
        insort(self._order, (-call.request.priority, self._arrivals, call))

    def remove(self, call: PendingPlacement) -> bool:
        """Remove a call; return whether it was queued."""
        for index, (_, _, queued) in enumerate(self._order):
            if queued is call:
                del self._order[index]
                return True
        return False

    def overdue(self, now: float) -> list[PendingPlacement]:
        """Return the calls whose deadline has passed."""
        return [call for call in self if call.deadline <= now]
