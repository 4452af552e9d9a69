"""Queue of placement requests: fair among tenants, by priority within a tenant.

The order is that of deficit round robin (Shreedhar and Varghese, 1996) with rounds of one token. In
each round, every tenant with queued calls receives as many tokens as its weight. Its first call is
due when it has received the cost of the call. The rounds are not executed: the round in which a
call is due is computed from the costs, and calls are ordered by it.

While two tenants both have queued calls, the tokens placed for each, divided by its weight, differ
by at most the cost of one call of each tenant, divided by its weight.
"""

import asyncio
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import merge

from services.common.placement import Placement, PlaceRequest
from services.router.capacity import Demand
from services.router.errors import RouterException


@dataclass(eq=False)
class PendingPlacement:
    """A placement request, which is answered exactly once. Times are in seconds."""

    request: PlaceRequest
    demand: Demand
    arrived: float
    deadline: float
    answer: Placement | RouterException | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def urgency(self) -> tuple[bool, int]:
        """Sort key among the calls of a tenant: admitted requests first, then by priority."""
        return not self.request.admitted, -self.request.priority

    def resolve(self, answer: Placement | RouterException) -> None:
        """Set the answer and wake the caller."""
        self.answer = answer
        self.answered.set()


_Entry = tuple[tuple[bool, int], int, PendingPlacement]  # urgency, number of the arrival, call


@dataclass
class _Line:
    """The queued calls of one tenant.

    Attributes:
        start: round after which the tenant receives tokens for its first call.
    """

    start: float
    weight: int = 1
    tokens: int = 0
    entries: list[_Entry] = field(default_factory=list)

    def due(self) -> Iterator[tuple[float, int, PendingPlacement]]:
        """Yield the round in which each call is due, the number of its arrival, and the call."""
        due = self.start
        for _, number, call in self.entries:
            due += call.demand.cost / self.weight
            yield due, number, call


class PlacementQueue:
    """Queued placement requests. The dispatcher ensures that there are at most ``max_waiting``."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._arrivals = 0
        self._round = 0.0
        self._lines: dict[str | None, _Line] = {}

    def __len__(self) -> int:
        return sum(len(line.entries) for line in self._lines.values())

    def __iter__(self) -> Iterator[PendingPlacement]:
        """Iterate over a copy of the queue, in the order in which calls should be placed."""
        lines = [line.due() for line in self._lines.values()]
        return iter([call for _, _, call in merge(*lines)])

    @property
    def overfull(self) -> bool:
        """Whether more than ``max_waiting`` calls are queued."""
        return len(self) > self._max_waiting

    @property
    def surplus(self) -> PendingPlacement:
        """The last call of the tenant with the most queued tokens for its weight."""
        line = max(self._lines.values(), key=lambda line: line.tokens / line.weight)
        return line.entries[-1][2]

    def add(self, call: PendingPlacement) -> None:
        """Queue a call after those of its tenant that are as urgent or more."""
        self._arrivals += 1
        line = self._lines.setdefault(call.request.tenant, _Line(self._round))
        line.weight = call.request.weight
        line.tokens += call.demand.cost
        insort(line.entries, (call.urgency, self._arrivals, call))

    def find(self, placement_id: str) -> PendingPlacement | None:
        """Return the queued call with this placement id, if there is one."""
        return next((call for call in self if call.request.placement_id == placement_id), None)

    def remove(self, call: PendingPlacement, *, placed: bool = False) -> bool:
        """Remove a call; return whether it was queued.

        Args:
            placed: whether the call was placed, so that its tokens are charged to its tenant.
        """
        tenant = call.request.tenant
        line = self._lines.get(tenant)
        found = [entry for entry in line.entries if entry[2] is call] if line else []
        if not line or not found:
            return False
        line.entries.remove(found[0])
        line.tokens -= call.demand.cost
        if placed:
            line.start += call.demand.cost / line.weight
            self._round = max(self._round, line.start)
        if not line.entries:
            del self._lines[tenant]
        return True

    def ahead(self, call: PendingPlacement) -> list[PendingPlacement]:
        """Return the queued calls of the same tenant that precede a queued call, in order."""
        own = [entry[2] for entry in self._lines[call.request.tenant].entries]
        return own[: own.index(call)]

    def tokens_before(self, call: PendingPlacement) -> float:
        """Return the tokens that are placed before a queued call.

        While its tenant receives the tokens for the call, other tenants receive as many for each
        unit of their weight, or fewer if they have fewer queued.
        """
        line = self._lines[call.request.tenant]
        before = sum(each.demand.cost for each in self.ahead(call))
        share = (before + call.demand.cost) / line.weight
        others = (other for other in self._lines.values() if other is not line)
        return before + sum(min(each.tokens, share * each.weight) for each in others)

    def overdue(self, now: float) -> list[PendingPlacement]:
        """Return the calls whose deadline has passed."""
        return [call for call in self if call.deadline <= now]
