"""Queue of placement requests: fair among tenants in tokens, by priority within a tenant."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from services.common.fair_queue import FairQueue
from services.common.placement import Placement, PlaceRequest, Role
from services.router.capacity import Demand
from services.router.errors import Refusal
from services.router.roster import Claim, Needs

MAX_RECLAIMED = 64
"""Maximum number of claims that one call of `reclaim` computes, to bound its duration."""
_MIN_DEADLINES = 64
"""Size of the heap of deadlines up to which entries of ended calls are not removed."""


@dataclass(eq=False)
class PendingPlacement:
    """A placement request. It is answered exactly once. Times are in seconds.

    Attributes:
        claim: shapes of the workers that can serve the request; see `services.router.roster`.
            Outdated as soon as `Roster.version` changes.
        expected: prompt tokens that each worker of the placement is expected to have cached, by the
            role in which it serves the request; empty before the placement.
        needs: pages that the request needs on the workers of each shape.
        cost: cost of the request, tokens.
        urgency: sort key among the calls of a tenant, see `QueuedRequest.urgency`.
    """

    request: PlaceRequest
    demand: Demand
    arrived: float
    deadline: float
    answer: Placement | Refusal | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    claim: Claim | None = None
    expected: dict[Role, int] = field(default_factory=dict)
    needs: Needs = field(init=False)
    tenant: str | None = field(init=False)
    weight: int = field(init=False)
    cost: int = field(init=False)
    urgency: tuple[bool, int] = field(init=False)

    def __post_init__(self) -> None:
        self.needs = Needs(self.demand)
        self.tenant = self.request.tenant
        self.weight = self.request.weight
        self.cost = self.demand.cost
        self.urgency = self.request.urgency

    @property
    def admitted(self) -> bool:
        """Whether the request was admitted before; see `QueuedRequest`."""
        return self.request.admitted

    def resolve(self, answer: Placement | Refusal) -> None:
        """Set the answer and wake the caller."""
        self.answer = answer
        self.answered.set()


class PlacementQueue(FairQueue[PendingPlacement]):
    """Queued placement requests. The dispatcher ensures that there are at most ``max_waiting``.

    Attributes:
        changes: number of changes of the queued calls or of their claims.
        claims: number of queued calls for each claim.
        pending_prompt_tokens: prompt tokens of all queued calls.
    """

    def __init__(self, max_waiting: int) -> None:
        super().__init__()
        self._max_waiting = max_waiting
        self._by_id: dict[str, PendingPlacement] = {}
        # Heap of the deadlines of queued calls, and of some that have left the queue.
        self._deadlines: list[tuple[float, int, PendingPlacement]] = []
        # Calls whose claim must be computed again.
        self._outdated: deque[PendingPlacement] = deque()
        self.changes = 0
        self.claims: Counter[Claim | None] = Counter()
        self.pending_prompt_tokens = 0

    @property
    def overfull(self) -> bool:
        """Whether more than ``max_waiting`` calls are queued."""
        return len(self) > self._max_waiting

    def add(self, item: PendingPlacement) -> None:
        """Queue a call. No other queued call has its placement id."""
        super().add(item)
        self.changes += 1
        self._by_id[item.request.placement_id] = item
        self.claims[item.claim] += 1
        self.pending_prompt_tokens += item.demand.prompt_tokens
        if len(self._deadlines) > _MIN_DEADLINES + 2 * len(self):
            self._deadlines = [entry for entry in self._deadlines if self._has(entry[2])]
            heapify(self._deadlines)
        heappush(self._deadlines, (item.deadline, self._arrivals, item))

    def remove(self, item: PendingPlacement, *, served: bool = False) -> bool:
        """Remove a call; see `FairQueue.remove`."""
        if not super().remove(item, served=served):
            return False
        self.changes += 1
        del self._by_id[item.request.placement_id]
        self._uncount(item)
        self.pending_prompt_tokens -= item.demand.prompt_tokens
        return True

    def outdate(self, *, excluding: bool = False) -> None:
        """Note that the claims of all queued calls are outdated and `reclaim` must compute them.

        Args:
            excluding: whether to note only the calls that exclude workers.
        """
        calls = (c for c in self._by_id.values() if c.demand.exclude or not excluding)
        self._outdated = deque(dict.fromkeys((*self._outdated, *calls)))

    def reclaim(self, claim: Callable[[Demand, Needs], Claim]) -> None:
        """Recompute the next `MAX_RECLAIMED` outdated claims (`PendingPlacement.claim`).

        An outdated claim does no harm: the call is not placed on workers that have joined since,
        and workers that have left are not found any more.

        Args:
            claim: returns the claim of a demand; see `Roster.claim`.
        """
        for _ in range(min(MAX_RECLAIMED, len(self._outdated))):
            call = self._outdated.popleft()
            if self._has(call):
                self.changes += 1
                self._uncount(call)
                call.needs = Needs(call.demand)
                call.claim = claim(call.demand, call.needs)
                self.claims[call.claim] += 1

    def find(self, placement_id: str) -> PendingPlacement | None:
        """Return the queued call with this placement id, if there is one."""
        return self._by_id.get(placement_id)

    def overdue(self, now: float) -> list[PendingPlacement]:
        """Return the queued calls whose deadline has passed. Each call is returned once."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now:
            call = heappop(self._deadlines)[2]
            if self._has(call):
                overdue.append(call)
        return overdue

    def _has(self, call: PendingPlacement) -> bool:
        return self._by_id.get(call.request.placement_id) is call

    def _uncount(self, call: PendingPlacement) -> None:
        self.claims[call.claim] -= 1
        if not self.claims[call.claim]:
            del self.claims[call.claim]
