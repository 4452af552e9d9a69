"""CPU time of the dispatcher with many workers and a long queue, without HTTP.

Requests arrive, are placed and end at the same constant rate, so that the length of the queue is
constant. Every worker sends four heartbeats in a second. The times of the events are simulated,
and the CPU time of each event is measured. One process handles them in order, so that a heartbeat
may wait for other events.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from statistics import median, quantiles

from services.common.memory import freeze_loaded
from services.common.placement import Outcome, Placement, PlaceRequest, Release, Role
from services.router.admission import Admission, AdmissionLimits
from services.router.capacity import Demand
from services.router.choice import PolicyName
from services.router.dispatcher import Dispatcher
from services.router.fleet import Fleet, FleetLimits
from services.router.policy import Pair
from services.router.queue import PlacementQueue
from services.router.simulated_workers import HEARTBEAT_S, heartbeat, registration

TICK_S = 0.02
TENANTS = 4
LENGTHS = (100, 1000)
"""Minimum and maximum tokens of a prompt, and of an output."""
WARM_UP_S = 0.5
"""Simulated time at the start that is not measured, seconds."""


@dataclass(frozen=True)
class Load:
    """Number of workers and of queued requests, and placements per second."""

    workers: int
    queued: int
    placements_per_s: float


@dataclass(frozen=True)
class Cost:
    """Measured cost of a load.

    Attributes:
        core: CPU seconds per simulated second.
        heartbeat_p99_s: p99 of the time from the arrival of a heartbeat until it is handled.
        placements_per_s: placements per simulated second.
        queued: number of queued requests at the end.
    """

    core: float
    heartbeat_p99_s: float
    placements_per_s: float
    queued: int


GOAL = Cost(core=0.5, heartbeat_p99_s=0.05, placements_per_s=1000.0, queued=4096)
"""Bounds of the cost of the largest load in `LOADS`."""
LOADS = (Load(16, 512, 1000.0), Load(128, 512, 1000.0), Load(256, 4096, 1000.0))


class LoadBench:
    """A dispatcher whose decode workers are full: one request is placed when another one ends."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._rng = Random(0)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._placed: deque[Placement] = deque()
        self._admitted: defaultdict[str, list[str]] = defaultdict(list)
        self._running: defaultdict[str, int] = defaultdict(int)
        self._placements = 0
        self._taken_s = 0.0
        self._clock_s = _clock_s()
        self._fleet = _RecordingFleet(FleetLimits(backlog=1.0))
        self.router = Dispatcher(
            self._fleet,
            PlacementQueue(2 * load.queued),
            PolicyName.SHORTEST_QUEUE,
            Random(0),
            output_reserve=256,
            max_wait_s=inf,
            admission=Admission(AdmissionLimits(shed_after_s=inf)),
        )
        for index in range(load.workers):
            role = (Role.DECODE, Role.PREFILL)[index % 2]
            name = f"w{index}"
            self.router.register(registration(name, role), 0.0)
            self._beat(name, role)
            self._at(HEARTBEAT_S * index / load.workers, partial(self._beat_again, name, role))
        while len(self.router.queue) < load.queued:
            self._submit()
        self._collect()
        self._at(0.0, self._end)
        self._at(0.0, self._tick)

    def run(self, seconds: float) -> Cost:
        """Return the cost over this simulated time."""
        freeze_loaded()  # as the router does
        busy_s = idle_at = 0.0
        waits: list[float] = []
        while self._events[0][0] < WARM_UP_S + seconds:
            self._now, _, event = heappop(self._events)
            if self._now < WARM_UP_S:
                self._placements = 0
            self._taken_s = 0.0
            event()
            self._collect()
            idle_at = max(idle_at, self._now) + self._taken_s
            if self._now >= WARM_UP_S:
                busy_s += self._taken_s
                if isinstance(event, partial):
                    waits.append(idle_at - self._now)
        p99_s = quantiles(waits, n=100, method="inclusive")[98]
        rate = self._placements / seconds
        return Cost(busy_s / seconds, p99_s, rate, len(self.router.queue))

    def _measure(self, call: Callable[[], object]) -> None:
        began = time.process_time()
        call()
        self._taken_s += time.process_time() - began - self._clock_s

    def _at(self, at: float, event: Callable[[], None]) -> None:
        heappush(self._events, (at, next(self._order), event))

    def _beat_again(self, name: str, role: Role) -> None:
        self._beat(name, role)
        self._at(self._now + HEARTBEAT_S, partial(self._beat_again, name, role))

    def _beat(self, name: str, role: Role) -> None:
        running = self._running[name] if role is Role.DECODE else 0
        rate = 1e6 if role is Role.PREFILL else 0.0
        admitted = self._admitted.pop(name, [])
        load = heartbeat(name, running, 0, 1000 * running, admitted, prompt_tokens_per_s=rate)
        self._measure(partial(self.router.heartbeat, load, self._now))

    def _submit(self) -> None:
        number = next(self._order)
        rng = self._rng
        request = PlaceRequest(
            placement_id=f"{number}",
            request_id="r",
            tenant=f"{number % TENANTS}",
            prompt_tokens=rng.randint(*LENGTHS),
            max_tokens=rng.randint(*LENGTHS),
            wait_s=3600.0,
        )
        self._measure(partial(self.router.submit, request, self._now))

    def _end(self) -> None:
        """End the oldest placed request. Submit another one."""
        placement = self._placed.popleft()
        self._running[placement.decode.worker_id] -= 1
        end = Release(placement_id=placement.placement_id, outcome=Outcome.OK)
        self._measure(partial(self.router.release, end, self._now))
        self._submit()
        self._at(self._now + 1 / self._load.placements_per_s, self._end)

    def _tick(self) -> None:
        self._measure(partial(self.router.advance, self._now))
        self._at(self._now + TICK_S, self._tick)

    def _collect(self) -> None:
        """Let the workers admit the requests that were placed."""
        for placement in self._fleet.take():
            self._placements += 1
            self._placed.append(placement)
            self._running[placement.decode.worker_id] += 1
            for worker in filter(None, (placement.prefill, placement.decode)):
                self._admitted[worker.worker_id].append(placement.placement_id)


def _clock_s() -> float:
    """Return the median time between two readings of the clock, in seconds."""
    taken = []
    for _ in range(1000):
        began = time.process_time()
        taken.append(time.process_time() - began)
    return median(taken)


class _RecordingFleet(Fleet):
    """A fleet that records its placements."""

    def __init__(self, limits: FleetLimits) -> None:
        super().__init__(limits)
        self._new: list[Placement] = []

    def promise(self, pair: Pair, demand: Demand, placement_id: str, now: float) -> Placement:
        placement = super().promise(pair, demand, placement_id, now)
        self._new.append(placement)
        return placement

    def take(self) -> list[Placement]:
        """Return the placements since the last call."""
        taken, self._new = self._new, []
        return taken
