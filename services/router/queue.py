"""Queue of placement requests: fair among tenants in tokens, by priority within a tenant."""

import asyncio
from dataclasses import dataclass, field

from services.common.fair_queue import FairQueue
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
    def tenant(self) -> str | None:
        return self.request.tenant

    @property
    def weight(self) -> int:
        return self.request.weight

    @property
    def cost(self) -> int:
        """Cost of the request, tokens."""
        return self.demand.cost

    @property
    def urgency(self) -> tuple[bool, int]:
        """Sort key among the calls of a tenant: admitted requests first, then by priority."""
        return not self.request.admitted, -self.request.priority

    def resolve(self, answer: Placement | RouterException) -> None:
        """Set the answer and wake the caller."""
        self.answer = answer
        self.answered.set()


class PlacementQueue(FairQueue[PendingPlacement]):
    """Queued placement requests. The dispatcher ensures that there are at most ``max_waiting``."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__()
        self._max_waiting = max_waiting

    @property
    def overfull(self) -> bool:
        """Whether more than ``max_waiting`` calls are queued."""
        return len(self) > self._max_waiting

    def find(self, placement_id: str) -> PendingPlacement | None:
        """Return the queued call with this placement id, if there is one."""
        calls = (call for line in self._lines.values() for _, _, call in line.entries)
        return next((call for call in calls if call.request.placement_id == placement_id), None)

    def overdue(self, now: float) -> list[PendingPlacement]:
        """Return the calls whose deadline has passed."""
        return [call for call in self if call.deadline <= now]
