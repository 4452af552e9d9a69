"""The dispatcher of encoder workers combines their fleet, a fair queue, admission and the policy.

Queued requests are placed in the order of the queue. While no worker of a model takes the first
one, those behind it for the same model wait as well, so that large requests do not starve.
"""

import asyncio
from dataclasses import dataclass, field
from random import Random

from services.common.encoder_placement import (
    EncodePlacement,
    EncodePlaceRequest,
    EncoderHeartbeat,
    EncoderRegistration,
)
from services.common.fair_queue import FairQueue
from services.common.placement import Outcome, Release, WorkerAddress
from services.common.router_errors import ErrorCode
from services.router.admission import Admission, surplus
from services.router.choice import PolicyName
from services.router.encoders.fleet import EncoderFleet
from services.router.encoders.policy import place_inputs
from services.router.errors import Refusal


@dataclass(eq=False)
class PendingEncode:
    """A placement request. It is answered exactly once. Times are in seconds.

    Attributes:
        urgency: sort key among the calls of a tenant, see `QueuedRequest.urgency`.
    """

    request: EncodePlaceRequest
    arrived: float
    deadline: float
    answer: EncodePlacement | Refusal | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    tenant: str | None = field(init=False)
    weight: int = field(init=False)
    cost: int = field(init=False)
    admitted: bool = field(init=False)
    urgency: tuple[bool, int] = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.tenant, self.weight, self.cost = request.tenant, request.weight, request.tokens
        self.admitted = request.admitted
        self.urgency = request.urgency

    def resolve(self, answer: EncodePlacement | Refusal) -> None:
        """Set the answer and wake the caller."""
        self.answer = answer
        self.answered.set()


class EncoderDispatcher:
    """Answers placement requests for encoders. ``now`` is in seconds of a monotonic clock.

    Args:
        max_waiting: maximum number of queued requests.
        backlog_s: time in which a worker computes the inputs that it gets in advance, seconds.
        settled_at: time from which all live workers have registered. Before it, a request that no
            registered worker takes is refused with `ErrorCode.STARTING`.

    Attributes:
        closed: whether the router is shutting down and refuses every call.
    """

    def __init__(
        self,
        fleet: EncoderFleet,
        policy: PolicyName,
        rng: Random,
        admission: Admission,
        *,
        max_waiting: int,
        max_wait_s: float,
        backlog_s: float,
        settled_at: float = 0.0,
    ) -> None:
        self.fleet = fleet
        self.queue: FairQueue[PendingEncode] = FairQueue()
        self.closed = False
        self._by_id: dict[str, PendingEncode] = {}
        self._policy = policy
        self._rng = rng
        self._admission = admission
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._backlog_s = backlog_s
        self._settled_at = settled_at

    def submit(self, request: EncodePlaceRequest, now: float) -> PendingEncode:
        """Submit a placement request; it is answered at once, or queued until its deadline."""
        self._admission.elapse(self.queue, now)
        call = PendingEncode(request, now, now + min(request.wait_s, self._max_wait_s))
        if self.closed:
            call.resolve(Refusal(ErrorCode.CLOSING, "this router is shutting down"))
            return call
        if self.fleet.has_seen(request.placement_id) or request.placement_id in self._by_id:
            call.resolve(
                Refusal(ErrorCode.RELEASED, "this placement was released, or its id is in use")
            )
            return call
        if refusal := self._refusal(request, now):
            call.resolve(refusal)
            return call
        self.queue.add(call)
        self._by_id[request.placement_id] = call
        self._place_waiting(now)
        if not call.answered.is_set():
            self._admit(call)
        return call

    def cancel(self, call: PendingEncode, now: float) -> None:
        """Cancel a call whose caller disconnected, and release its placement if it has one."""
        self._admission.elapse(self.queue, now)
        self._remove(call)
        if isinstance(call.answer, EncodePlacement):
            gone = Release(placement_id=call.answer.placement_id, outcome=Outcome.CANCELLED)
            self.fleet.release(gone, now)
        self._place_waiting(now)

    def register(self, registration: EncoderRegistration, now: float) -> None:
        """Register a worker; see `EncoderFleet.register`."""
        self.fleet.register(registration, now)

    def heartbeat(self, beat: EncoderHeartbeat, now: float) -> bool:
        """Update a worker; see `EncoderFleet.heartbeat`."""
        self._admission.elapse(self.queue, now)
        known = self.fleet.heartbeat(beat, now)
        self._place_waiting(now)
        return known

    def release(self, release: Release, now: float) -> None:
        """Record the end of a placed request, or cancel the call that would place it."""
        self._admission.elapse(self.queue, now)
        request_s = self.fleet.release(release, now)
        if request_s is None:
            if call := self._by_id.get(release.placement_id):
                self._answer(call, Refusal(ErrorCode.RELEASED, "this placement was released"))
            else:  # nothing has become free
                return
        elif release.outcome is Outcome.OK:
            self._admission.ended(request_s)
        self._place_waiting(now)

    def advance(self, now: float) -> list[WorkerAddress]:
        """Expire overdue calls, placements and workers without heartbeats. Call it periodically.

        Returns:
            The workers that were removed.
        """
        self._admission.elapse(self.queue, now)
        gone = self.fleet.expire(now)
        for call in [call for call in self._by_id.values() if call.deadline <= now]:
            waited_s = now - call.arrived
            message = f"no encoder worker had capacity within {waited_s:.1f} s"
            self._answer(call, Refusal(ErrorCode.QUEUE_TIMEOUT, message))
        self._place_waiting(now)
        if not len(self.queue) and self.fleet.idle:
            self._admission.reset()
        return gone

    def close(self) -> None:
        """Refuse all queued and future calls."""
        self.closed = True
        for call in self.queue:
            self._answer(call, Refusal(ErrorCode.CLOSING, "this router is shutting down"))

    def _admit(self, call: PendingEncode) -> None:
        """Refuse a queued call that would wait too long, or the surplus one of a full queue."""
        if refusal := self._admission.refusal(self.queue, call):
            self._answer(call, refusal)
        elif len(self.queue) > self._max_waiting and (refused := surplus(self.queue, call)):
            self._answer(
                refused, self._admission.queue_full_error(self.queue, refused, "the queue is full")
            )

    def _place_waiting(self, now: float) -> None:
        """Answer the queued calls that can be placed or refused, in order."""
        if not len(self.queue):
            return
        answers: list[tuple[PendingEncode, EncodePlacement | Refusal]] = []
        blocked: set[str] = set()
        for call in self.queue.ordered(lambda call: call.request.model not in blocked):
            request = call.request
            if request.model in blocked:
                continue
            if refusal := self._refusal(request, now):
                answers.append((call, refusal))
                continue
            worker = place_inputs(
                request.tokens,
                self.fleet.candidates(request, now),
                self._policy,
                self._rng,
                backlog_s=self._backlog_s,
                exclude=request.exclude,
            )
            if worker is not None:
                self._admission.placed(call)
                answers.append((call, self.fleet.place(worker, request, now)))
            elif not request.exclude:
                blocked.add(request.model)
        for call, answer in answers:
            self._answer(call, answer)

    def _refusal(self, request: EncodePlaceRequest, now: float) -> Refusal | None:
        refusal = self.fleet.refusal(request, now)
        # A call that excludes workers need not wait for others to register: if it is refused, the
        # gateway repeats it without exclusions.
        if refusal and now < self._settled_at and not request.exclude:
            return Refusal(
                ErrorCode.STARTING,
                "the router has just started, and no suitable encoder worker has registered yet",
            )
        return refusal

    def _answer(self, call: PendingEncode, answer: EncodePlacement | Refusal) -> None:
        self._remove(call, served=isinstance(answer, EncodePlacement))
        call.resolve(answer)

    def _remove(self, call: PendingEncode, *, served: bool = False) -> None:
        self.queue.remove(call, served=served)
        if self._by_id.get(call.request.placement_id) is call:
            del self._by_id[call.request.placement_id]
