"""Slow reference of the dispatcher and its queue; see `tests.services.router.slow_policy`."""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import Any

from services.common.placement import PlaceRequest, Role
from services.router.capacity import USABLE, Demand, WorkerSnapshot
from services.router.dispatcher import Dispatcher
from services.router.policy import Pair
from services.router.queue import PendingPlacement, PlacementQueue
from services.router.roster import Reason
from tests.services.router.slow_policy import NoPlacement, place


@dataclass
class _Line:
    start: float
    weight: int = 1
    entries: list[tuple[Any, int, PendingPlacement]] = field(default_factory=list)

    def due(self) -> Iterator[tuple[float, int, PendingPlacement]]:
        due = self.start
        for _, number, item in self.entries:
            due += item.cost / self.weight
            yield due, number, item


class SlowQueue(PlacementQueue):
    """Queue whose operations examine all calls."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(max_waiting)
        self._slow: dict[str | None, _Line] = {}

    def __len__(self) -> int:
        return sum(len(line.entries) for line in self._slow.values())

    def __iter__(self) -> Iterator[PendingPlacement]:
        lines = [line.due() for line in self._slow.values()]
        return iter([item for _, _, item in merge(*lines)])

    def surplus(
        self, wanted: Callable[[PendingPlacement], bool] = lambda _: True
    ) -> PendingPlacement | None:
        def load(line: _Line) -> float:
            return sum(call.cost for _, _, call in line.entries) / line.weight

        lines = sorted(self._slow.values(), key=load, reverse=True)
        calls = (call for line in lines for _, _, call in reversed(line.entries))
        return next(filter(wanted, calls), None)

    def add(self, item: PendingPlacement) -> None:
        self._arrivals += 1
        line = self._slow.setdefault(item.tenant, _Line(self._round))
        line.weight = item.weight
        insort(line.entries, (item.urgency, self._arrivals, item))

    def remove(self, item: PendingPlacement, *, served: bool = False) -> bool:
        line = self._slow.get(item.tenant)
        found = [entry for entry in line.entries if entry[2] is item] if line else []
        if not line or not found:
            return False
        line.entries.remove(found[0])
        if served:
            line.start += item.cost / line.weight
            self._round = max(self._round, line.start)
        if not line.entries:
            del self._slow[item.tenant]
        return True

    def find(self, placement_id: str) -> PendingPlacement | None:
        return next((call for call in self if call.request.placement_id == placement_id), None)

    def overdue(self, now: float) -> list[PendingPlacement]:
        return [call for call in self if call.deadline <= now]

    def earliest_ahead(
        self, item: PendingPlacement, wanted: Callable[[PendingPlacement], bool] = lambda _: True
    ) -> Iterator[PendingPlacement]:
        own = [entry[2] for entry in self._slow[item.tenant].entries]
        return filter(wanted, own[: own.index(item)])

    def cost_before(self, item: PendingPlacement) -> float:
        line = self._slow[item.tenant]
        before = sum(each.cost for each in self.earliest_ahead(item))
        share = (before + item.cost) / line.weight
        return before + sum(
            min(sum(call.cost for _, _, call in other.entries), share * other.weight)
            for other in self._slow.values()
            if other is not line
        )


class SlowDispatcher(Dispatcher):
    """Dispatcher that examines every queued call on every worker in every event."""

    def submit(
        self, request: PlaceRequest, now: float, prefix: tuple[bytes, ...] = ()
    ) -> PendingPlacement:
        self.admission.elapse(self.queue, now)
        may_wait = min(request.wait_s, self._max_wait_s) > 0
        reserve = self._output_reserve
        demand = Demand.of(request, output_reserve=reserve, may_wait=may_wait, prefix=prefix)
        call = PendingPlacement(request, demand, now, now + min(request.wait_s, self._max_wait_s))
        workers, cached = self.fleet.snapshots(now), self.fleet.cached(demand)
        result = place(demand, workers, self._policy, self._rng, cached=cached)
        if isinstance(result, NoPlacement) and result.reason is not Reason.BUSY:
            call.resolve(self._refusal(result.reason, request, now))
        elif isinstance(result, Pair) and not len(self.queue):
            call.resolve(self._promise(result, call, now))
        else:
            self.queue.add(call)
            self._place_waiting(now)
            if not call.answered.is_set():
                self._admit(call)
        return call

    def _place_waiting(self, now: float) -> None:
        workers = self.fleet.snapshots(now)
        reserved: frozenset[str] = frozenset()
        calls = list(self.queue)
        queued = sum(call.demand.prompt_tokens for call in calls)
        for call in calls:
            if _is_blocked(call.demand, workers, reserved):
                continue
            rest = queued - call.demand.prompt_tokens
            result = place(
                call.demand,
                workers,
                self._policy,
                self._rng,
                reserved=reserved,
                queued=rest,
                cached=self.fleet.cached(call.demand),
            )
            if isinstance(result, Pair):
                self.admission.placed(call)
                self._answer(call, self._promise(result, call, now))
                queued -= call.demand.prompt_tokens
                workers = self.fleet.snapshots(now)
            elif result.reason is Reason.BUSY:
                reserved |= result.candidates
            else:
                self._answer(call, self._refusal(result.reason, call.request, now))


def _is_blocked(
    demand: Demand, workers: Sequence[WorkerSnapshot], reserved: frozenset[str]
) -> bool:
    able = [
        worker.worker_id
        for worker in workers
        if worker.health in USABLE
        and worker.worker_id not in demand.exclude
        and demand.model in (None, worker.model.name)
        and worker.roles != (Role.PREFILL,)
    ]
    return bool(able) and reserved.issuperset(able)
