"""Brings together the fleet, the waiting room and the policy: every place call goes through here.

Requests are answered in order. One that cannot be placed holds every worker that it waits for, so
that nobody behind it takes the room that it needs: large requests do not starve, and requests for
other workers pass.
"""

from collections.abc import Callable
from random import Random
from uuid import uuid4

from services.common.placement import (
    Heartbeat,
    Outcome,
    Placement,
    PlaceRequest,
    Registration,
    Release,
    Role,
    WorkerAddress,
)
from services.router.errors import (
    Malformed,
    NoWorkers,
    QueueFull,
    QueueTimeout,
    Refusal,
    TooLarge,
    UnknownModel,
)
from services.router.fleet import Fleet
from services.router.policy import (
    TRUSTED,
    Demand,
    NotNow,
    Pair,
    PolicyName,
    Reason,
    WorkerSnapshot,
    place,
)
from services.router.queue import Ticket, WaitingRoom


class Dispatcher:
    """Synchronous and without a clock: ``now`` is passed in, waiters are woken through tickets."""

    def __init__(
        self,
        fleet: Fleet,
        room: WaitingRoom,
        policy: PolicyName,
        rng: Random,
        *,
        output_reserve: int,
        max_wait_s: float,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self.fleet = fleet
        self.room = room
        self.closed = False
        self._policy = policy
        self._rng = rng
        self._output_reserve = output_reserve
        self._max_wait_s = max_wait_s
        self._new_id = new_id

    def submit(self, request: PlaceRequest, now: float) -> Ticket:
        """A ticket that is answered at once, or will be: by a change of load, or its deadline."""
        demand = Demand(
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            choices=request.choices,
            model=request.model,
            exclude=frozenset(request.exclude),
            output_reserve=self._output_reserve,
        )
        ticket = Ticket(request, demand, now, now + min(request.wait_s, self._max_wait_s))
        if self.closed:
            ticket.resolve(NoWorkers("this router is going down"))
            return ticket
        verdict = self._place(demand, self.fleet.snapshots(now))
        if isinstance(verdict, NotNow) and verdict.reason is not Reason.BUSY:
            ticket.resolve(_refusal(verdict.reason, request))
            return ticket
        if isinstance(verdict, Pair) and not len(self.room):
            ticket.resolve(self._promise(verdict, demand, now))
            return ticket
        self.room.enter(ticket)
        self._sweep(now)
        if not ticket.answered.is_set() and (self.room.overfull or ticket.deadline <= now):
            self._answer(ticket, QueueFull("every worker is full"))
        return ticket

    def abandon(self, ticket: Ticket, now: float) -> None:
        """The caller left: nothing of its call may stay, and those behind it move up."""
        self.room.leave(ticket)
        if isinstance(ticket.answer, Placement):
            gone = Release(placement_id=ticket.answer.placement_id, outcome=Outcome.CANCELLED)
            self.fleet.release(gone, now)
        self._sweep(now)

    def register(self, registration: Registration, now: float) -> None:
        """Raises: StaleEpoch, QueueFull; see `Fleet.register`."""
        self.fleet.register(registration, now)

    def heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """False where the worker must register first. Raises: StaleEpoch."""
        known = self.fleet.heartbeat(beat, now)
        self._sweep(now)
        return known

    def release(self, release: Release, now: float) -> None:
        """A placed request ended."""
        self.fleet.release(release, now)
        self._sweep(now)

    def settle(self, now: float) -> list[WorkerAddress]:
        """Does what time demands, to be called every few milliseconds; returns workers now gone."""
        gone = self.fleet.expire(now)
        for ticket in self.room.overdue(now):
            waited_s = now - ticket.arrived
            self._answer(ticket, QueueTimeout(f"nothing had room within {waited_s:.1f} s"))
        self._sweep(now)
        return gone

    def close(self) -> None:
        """Sends away whoever waits, and whoever comes."""
        self.closed = True
        for ticket in self.room:
            self._answer(ticket, NoWorkers("this router is going down"))

    def _sweep(self, now: float) -> None:
        """Answers whoever can be answered, in the room's order."""
        if not len(self.room):
            return
        workers = self.fleet.snapshots(now)
        held: frozenset[str] = frozenset()
        for ticket in self.room:
            if _stands_behind(ticket.demand, workers, held):
                continue
            verdict = self._place(ticket.demand, workers, held)
            if isinstance(verdict, Pair):
                self._answer(ticket, self._promise(verdict, ticket.demand, now))
                workers = self.fleet.snapshots(now)
            elif verdict.reason is Reason.BUSY:
                held |= verdict.waits_for
            else:
                self._answer(ticket, _refusal(verdict.reason, ticket.request))

    def _place(
        self,
        demand: Demand,
        workers: list[WorkerSnapshot],
        held: frozenset[str] = frozenset(),
    ) -> Pair | NotNow:
        return place(demand, workers, self._policy, self._rng, held=held)

    def _promise(self, pair: Pair, demand: Demand, now: float) -> Placement:
        return self.fleet.promise(pair, demand, self._new_id(), now)

    def _answer(self, ticket: Ticket, answer: Placement | Refusal) -> None:
        self.room.leave(ticket)
        ticket.resolve(answer)


def _stands_behind(demand: Demand, workers: list[WorkerSnapshot], held: frozenset[str]) -> bool:
    """Whether all that could take the request is held: a short cut that saves asking the policy."""
    behind = False
    for worker in workers:
        if worker.standing not in TRUSTED or worker.worker_id in demand.exclude:
            continue
        if demand.model not in (None, worker.model) or worker.role is Role.PREFILL:
            continue
        if worker.worker_id not in held:
            return False
        behind = True
    return behind


def _refusal(reason: Reason, request: PlaceRequest) -> Refusal:
    match reason:
        case Reason.UNKNOWN_MODEL:
            return UnknownModel(f"no worker serves the model {request.model!r}")
        case Reason.AMBIGUOUS_MODEL:
            return Malformed("model: several are served, name one")
        case Reason.TOO_LARGE:
            return TooLarge(
                f"{request.prompt_tokens} prompt and {request.max_tokens} output tokens in "
                f"{request.choices} choices fit no worker"
            )
        case _:
            return NoWorkers("no pair of compatible workers is ready")
