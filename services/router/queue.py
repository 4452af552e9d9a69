"""The waiting room: requests that nothing has room for yet, larger priority first, then FIFO."""

import asyncio
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.common.placement import Placement, PlaceRequest
from services.router.errors import Refusal
from services.router.policy import Demand


@dataclass(eq=False)
class Ticket:
    """One place call. It is answered once, whether it had to wait or not; times in seconds."""

    request: PlaceRequest
    demand: Demand
    arrived: float
    deadline: float
    answer: Placement | Refusal | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def resolve(self, answer: Placement | Refusal) -> None:
        self.answer = answer
        self.answered.set()


class WaitingRoom:
    """At most ``bound`` tickets between calls; the dispatcher looks at `overfull` after each."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._arrivals = 0
        self._order: list[tuple[int, int, Ticket]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Ticket]:
        return iter([ticket for _, _, ticket in self._order])

    @property
    def overfull(self) -> bool:
        return len(self._order) > self._bound

    def enter(self, ticket: Ticket) -> None:
        self._arrivals += 1
        insort(self._order, (-ticket.request.priority, self._arrivals, ticket))

    def leave(self, ticket: Ticket) -> bool:
        """False where the ticket was not waiting."""
        for index, (_, _, waiting) in enumerate(self._order):
            if waiting is ticket:
                del self._order[index]
                return True
        return False

    def overdue(self, now: float) -> list[Ticket]:
        """Those that have waited as long as they may."""
        return [ticket for ticket in self if ticket.deadline <= now]
