"""The dispatcher combines the fleet, the queue, admission and the policy to place requests.

Queued requests are placed in the order of the queue. If no worker has capacity for a request, it
reserves every worker that could take it later, so that requests behind it cannot use that capacity.
Therefore, large requests do not starve. Requests that other workers can take are not blocked.
Reservations concern decoding: a reserved prefill worker still computes prompts for decode workers.
"""

from collections.abc import Collection
from random import Random

from services.common.placement import (
    Heartbeat,
    Outcome,
    Placement,
    PlaceRequest,
    Registration,
    Release,
    WorkerAddress,
)
from services.common.router_errors import ErrorCode
from services.router.admission import Admission, AdmissionLimits, surplus
from services.router.capacity import Demand
from services.router.choice import PolicyName
from services.router.errors import Refusal
from services.router.fleet import Fleet
from services.router.policy import Pair, place
from services.router.queue import PendingPlacement, PlacementQueue
from services.router.roster import Claim, Reason, Roster


class Dispatcher:
    """Answers placement requests. Methods take ``now``, in seconds of a monotonic clock.

    Args:
        settled_at: time from which all live workers have registered. Before it, a call without
            exclusions that no registered worker takes is refused with `ErrorCode.STARTING`.

    Attributes:
        closed: whether the router is shutting down and refuses every call.
        failure: why the last `advance` failed, or None.
        admission: predicts waits in the queue.
    """

    def __init__(
        self,
        fleet: Fleet,
        queue: PlacementQueue,
        policy: PolicyName,
        rng: Random,
        *,
        output_reserve: int,
        max_wait_s: float,
        admission: Admission | None = None,
        settled_at: float = 0.0,
    ) -> None:
        self.fleet = fleet
        self.queue = queue
        self.closed = False
        self.failure: str | None = None
        self._policy = policy
        self._rng = rng
        self._output_reserve = output_reserve
        self._max_wait_s = max_wait_s
        self.admission = admission or Admission(AdmissionLimits())
        self._settled_at = settled_at
        # `Roster.version` and `Roster.changes` when all claims were last marked as outdated.
        self._claimed = 0, 0
        # `Roster.updates` and `PlacementQueue.changes` when last no queued call could be answered.
        self._blocked = 0, 0

    def is_settled(self, now: float) -> bool:
        """Return whether all live workers have registered."""
        return now >= self._settled_at

    def submit(
        self, request: PlaceRequest, now: float, prefix: tuple[bytes, ...] = ()
    ) -> PendingPlacement:
        """Submit a placement request; it is answered at once, or queued until its deadline.

        It is refused if it would wait too long in the queue. If the queue is full, a call of the
        tenant with the most queued tokens for its weight is refused.

        Args:
            prefix: hashes of the beginning of the prompt; see `services.common.prefix_hashes`.
        """
        self.admission.elapse(self.queue, now)
        may_wait = min(request.wait_s, self._max_wait_s) > 0
        reserve = self._output_reserve
        demand = Demand.of(request, output_reserve=reserve, may_wait=may_wait, prefix=prefix)
        call = PendingPlacement(request, demand, now, now + min(request.wait_s, self._max_wait_s))
        if self.closed:
            call.resolve(Refusal(ErrorCode.CLOSING, "this router is shutting down"))
            return call
        if self.fleet.has_seen(request.placement_id) or self.queue.find(request.placement_id):
            call.resolve(
                Refusal(ErrorCode.RELEASED, "this placement was released, or its id is in use")
            )
            return call
        call.claim = self.fleet.roster(now).claim(demand, call.needs)
        if call.claim.reason is not Reason.BUSY:
            call.resolve(self._refusal(call.claim.reason, request, now))
            return call
        if not len(self.queue):
            if pair := self._place(call):
                call.resolve(self._promise(pair, call, now))
                return call
            self.queue.add(call)
        else:
            self.queue.add(call)
            self._place_waiting(now)
        if not call.answered.is_set():
            self._admit(call)
        return call

    def _admit(self, call: PendingPlacement) -> None:
        """Refuse a queued call that would wait too long, or the surplus one of a full queue."""
        if refusal := self.admission.refusal(self.queue, call):
            self._answer(call, refusal)
        elif self.queue.overfull and (refused := surplus(self.queue, call)):
            self._answer(
                refused, self.admission.queue_full_error(self.queue, refused, "the queue is full")
            )

    def cancel(self, call: PendingPlacement, now: float) -> None:
        """Cancel a call whose caller disconnected, and release its placement if it has one."""
        self.admission.elapse(self.queue, now)
        self.queue.remove(call)
        if isinstance(call.answer, Placement):
            gone = Release(placement_id=call.answer.placement_id, outcome=Outcome.CANCELLED)
            self.fleet.release(gone, now)
        self._place_waiting(now)

    def register(self, registration: Registration, now: float) -> None:
        """Register a worker; see `Fleet.register`."""
        self.fleet.register(registration, now)

    def heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """Update a worker; see `Fleet.heartbeat`."""
        self.admission.elapse(self.queue, now)
        known = self.fleet.heartbeat(beat, now)
        self._place_waiting(now)
        return known

    def release(self, release: Release, now: float) -> None:
        """Record the end of a placed request, or cancel the call that would place it."""
        self.admission.elapse(self.queue, now)
        request_s = self.fleet.release(release, now)
        if request_s is None:
            if call := self.queue.find(release.placement_id):
                self._answer(call, Refusal(ErrorCode.RELEASED, "this placement was released"))
            else:  # nothing has become free
                return
        elif release.outcome is Outcome.OK:
            self.admission.ended(request_s)
        self._place_waiting(now)

    def advance(self, now: float) -> list[WorkerAddress]:
        """Expire overdue calls, promises and workers without heartbeats. Call it periodically.

        Returns:
            The workers that were removed.
        """
        self.admission.elapse(self.queue, now)
        gone = self.fleet.expire(now)
        for call in self.queue.overdue(now):
            waited_s = now - call.arrived
            self._answer(
                call,
                Refusal(ErrorCode.QUEUE_TIMEOUT, f"no worker had capacity within {waited_s:.1f} s"),
            )
        self._place_waiting(now)
        if not len(self.queue) and self.fleet.idle:
            self.admission.reset()
        return gone

    def close(self) -> None:
        """Refuse all queued and future calls."""
        self.closed = True
        for call in self.queue:
            self._answer(call, Refusal(ErrorCode.CLOSING, "this router is shutting down"))

    def _place_waiting(self, now: float) -> None:
        """Answer the queued calls that can be placed or refused, in order.

        If the last attempt answered no call, and neither workers nor queue have changed since,
        nothing is examined.
        """
        if not len(self.queue):
            return
        roster = self.fleet.roster(now)
        if (seen := (roster.version, roster.changes)) != self._claimed:
            self.queue.outdate(excluding=roster.version == self._claimed[0])
            self._claimed = seen
        self.queue.reclaim(roster.claim)
        if (state := (roster.updates, self.queue.changes)) == self._blocked:
            return
        left = self._servable(roster)
        if not left or not self._answer_waiting(left, now):
            self._blocked = state

    def _answer_waiting(self, left: dict[Claim, int], now: float) -> bool:
        """Answer the queued calls with these claims that can be placed or refused, in order.

        A call that cannot be placed reserves the workers that may decode it. Claims whose workers
        are all reserved are dropped. The examination ends when no claim is left.

        Args:
            left: number of calls for each claim to examine; changed by this method.

        Returns:
            Whether any call was answered.
        """
        answers: list[tuple[PendingPlacement, Placement | Refusal]] = []
        reserved: set[str] = set()
        queued = self.queue.pending_prompt_tokens
        try:
            for call in self.queue.ordered(lambda call: call.claim in left):
                claim = call.claim
                if claim is None or claim not in left:
                    continue
                left[claim] -= 1
                if claim.reason is not Reason.BUSY:
                    answers.append((call, self._refusal(claim.reason, call.request, now)))
                elif pair := self._place(call, reserved, queued - call.demand.prompt_tokens):
                    answers.append((call, self._promise(pair, call, now)))
                    queued -= call.demand.prompt_tokens
                    self.fleet.roster(now)
                else:
                    reserved |= claim.candidates
                    for blocked in [each for each in left if each.is_blocked(reserved)]:
                        del left[blocked]
                if not left.get(claim, 1):
                    del left[claim]
                if not left:
                    break
        finally:
            for call, answer in answers:
                if isinstance(answer, Placement):
                    self.admission.placed(call)
                self._answer(call, answer)
        return bool(answers)

    def _servable(self, roster: Roster) -> dict[Claim, int]:
        """Return the claims whose calls must be examined, with the number of calls of each claim.

        Claims without a worker with capacity (`Claim.is_open`) are left out, because their calls
        cannot be placed. All claims are returned in two cases, in which the workers that such calls
        reserve affect other calls. Slow workers get prompts if all faster workers are reserved. A
        call that would be refused waits while all workers that could serve it are reserved.
        """
        claims = self.queue.claims
        every = roster.has_slow or any(c and c.reason is not Reason.BUSY for c in claims)
        return {c: number for c, number in claims.items() if c and (every or c.is_open)}

    def _place(
        self, call: PendingPlacement, reserved: Collection[str] = (), queued: int = 0
    ) -> Pair | None:
        pools = call.claim.pools if call.claim else ()
        return place(
            call.demand,
            pools,
            self._policy,
            self._rng,
            needs=call.needs,
            reserved=reserved,
            queued=queued,
            cached=self.fleet.cached(call.demand),
        )

    def _refusal(self, reason: Reason, request: PlaceRequest, now: float) -> Refusal:
        # A call that excludes workers need not wait for others to register: if it is refused, the
        # gateway repeats it without exclusions.
        starting = not self.is_settled(now) and not request.exclude
        if starting and reason is not Reason.AMBIGUOUS_MODEL:
            return Refusal(
                ErrorCode.STARTING,
                "the router has just started, and no suitable worker has registered yet",
            )
        match reason:
            case Reason.UNKNOWN_MODEL:
                return Refusal(
                    ErrorCode.UNKNOWN_MODEL, f"no worker serves the model {request.model!r}"
                )
            case Reason.AMBIGUOUS_MODEL:
                return Refusal(
                    ErrorCode.INVALID, "model: must be set, because several models are served"
                )
            case Reason.TOO_LARGE:
                output = request.required_tokens or request.max_tokens
                return Refusal(
                    ErrorCode.TOO_LARGE,
                    f"{request.prompt_tokens} prompt and {output} output tokens in "
                    f"{request.choices} choices do not fit on any worker",
                )
            case _:
                return Refusal(ErrorCode.NO_WORKERS, "no pair of compatible workers is ready")

    def _promise(self, pair: Pair, call: PendingPlacement, now: float) -> Placement:
        call.expected = {role: pair.expected(worker) for worker, role in pair.roles}
        return self.fleet.promise(pair, call.demand, call.request.placement_id, now)

    def _answer(self, call: PendingPlacement, answer: Placement | Refusal) -> None:
        self.queue.remove(call, served=isinstance(answer, Placement))
        call.resolve(answer)
